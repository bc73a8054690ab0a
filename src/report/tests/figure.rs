//! The figure: every row that has a distance is drawn and named.

use super::*;

#[test]
fn the_figure_names_every_strategy_with_a_distance_and_says_nothing_else_than_the_table() {
    let report = finished();
    let figure = crate::report::figure::svg(&report);
    assert!(figure.starts_with("<svg") && figure.trim_end().ends_with("</svg>"));
    let last = report.groups.last().unwrap();
    assert!(figure.contains(&last.title), "{}", last.title);
    let mut n_drawn = 0;
    for row in &last.rows {
        let Some(scores) = row.scores() else { continue };
        if scores.quality.kld.value > 0.0 && scores.memory.is_some() {
            n_drawn += 1;
            let name = row.label.split('(').next().unwrap().trim();
            assert!(figure.contains(name), "{name}");
        }
    }
    assert!(n_drawn > 1);
    assert!(figure.matches("<circle").count() >= n_drawn);
    assert_eq!(figure, crate::report::figure::svg(&report));
}

//! Quality against bytes as a figure: one panel per protocol, one line per strategy through what its parameters give.
//!
//! Invariants: every point is a row of the table, with the row's interval; a strategy without a distance to the reference, or
//! without bytes, has none; the file follows from the report alone, to the byte.

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::rows::{Group, Report, Row};

/// Pixels of a panel.
const PANEL: (u32, u32) = (960, 560);
/// Okabe and Ito's colours, which colour-blind readers can tell apart.
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 0, 0),
    RGBColor(128, 128, 128),
];
/// Distances below this are drawn here.
const LEAST_KLD: f64 = 1e-5;

/// One row.
#[derive(Debug, Clone, PartialEq)]
struct Point {
    /// Resident bytes, % of an f16 cache's.
    percent: f64,
    kld: f64,
    /// Of the distance, low and high.
    interval: Option<(f64, f64)>,
    /// What tells it apart within its line.
    parameters: String,
}

/// Rows that differ in their parameters alone.
#[derive(Debug, Clone, PartialEq)]
struct Line {
    name: String,
    /// In order of bytes.
    points: Vec<Point>,
}

/// The figure; empty where no two rows could be compared by it.
pub fn svg(report: &Report) -> String {
    let panels: Vec<(&Group, Vec<Line>)> = panels(report)
        .map(|group| (group, lines(&group.rows)))
        .filter(|(_, lines)| lines.iter().map(|l| l.points.len()).sum::<usize>() > 1)
        .collect();
    if panels.is_empty() {
        return String::new();
    }
    let mut out = String::new();
    let drawn = {
        let size = (PANEL.0, PANEL.1 * panels.len() as u32);
        let root = SVGBackend::with_string(&mut out, size).into_drawing_area();
        draw(&root, &panels)
    };
    match drawn {
        Ok(()) => out,
        // A text can't refuse what is drawn into it.
        Err(_) => String::new(),
    }
}

/// The group over most data of each protocol.
fn panels(report: &Report) -> impl Iterator<Item = &Group> {
    let groups = report.groups.iter().filter(|g| !g.is_asked());
    let is_last = |group: &&Group| {
        let mut same = report
            .groups
            .iter()
            .filter(|g| g.protocol == group.protocol);
        same.next_back()
            .is_some_and(|last| std::ptr::eq(last, *group))
    };
    groups.filter(is_last)
}

fn lines(rows: &[Row]) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    for row in rows {
        let Some(scores) = row.scores() else { continue };
        let (Some(memory), kld) = (&scores.memory, &scores.quality.kld) else {
            continue;
        };
        // NaN has no place either.
        if !(kld.value > 0.0 && memory.f16_bytes > 0) {
            continue;
        }
        let (name, parameters) = apart(&row.label);
        let point = Point {
            percent: 100.0 * memory.resident_vs_f16(),
            kld: kld.value.max(LEAST_KLD),
            interval: kld.interval,
            parameters,
        };
        match lines.iter_mut().find(|l| l.name == name) {
            Some(line) => line.points.push(point),
            None => lines.push(Line {
                name,
                points: vec![point],
            }),
        }
    }
    for line in &mut lines {
        line.points.sort_by(|a, b| a.percent.total_cmp(&b.percent));
    }
    lines
}

/// A label without what stands in parentheses, and that.
fn apart(label: &str) -> (String, String) {
    let (mut name, mut parameters) = (String::new(), String::new());
    let mut depth = 0;
    for c in label.chars() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ if depth > 0 => parameters.push(c),
            _ => name.push(c),
        }
    }
    (name.trim().to_owned(), parameters)
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;
type Drawn = Result<(), Box<dyn std::error::Error>>;

fn draw(root: &Area<'_>, panels: &[(&Group, Vec<Line>)]) -> Drawn {
    root.fill(&WHITE)?;
    let areas = root.split_evenly((panels.len(), 1));
    for (area, (group, lines)) in areas.iter().zip(panels) {
        let n = group.baseline.map_or(0, |b| b.n_items);
        panel(area, &format!("{} (n = {n} items)", group.title), lines)?;
    }
    root.present()?;
    Ok(())
}

/// From a little below the least to a little above the greatest.
fn span(values: impl Iterator<Item = f64>) -> std::ops::Range<f64> {
    let (low, high) = values.fold((f64::INFINITY, 0.0f64), |(l, h), x| (l.min(x), h.max(x)));
    low / 1.5..high * 1.5
}

fn panel(area: &Area<'_>, title: &str, lines: &[Line]) -> Drawn {
    let points = || lines.iter().flat_map(|l| &l.points);
    let x = span(points().map(|p| p.percent));
    let y = span(points().map(|p| p.kld));
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 17))
        .margin(12)
        .margin_right(270)
        .x_label_area_size(46)
        .y_label_area_size(72)
        .build_cartesian_2d(x.log_scale(), y.clone().log_scale())?;
    chart
        .configure_mesh()
        .x_desc("resident bytes, % of f16")
        .y_desc("KLD to the f32 cache, nats per token (bars: 95 %)")
        .x_labels(12)
        .label_style(("sans-serif", 13))
        .light_line_style(RGBColor(238, 238, 238))
        .x_label_formatter(&|x| {
            format!("{x:.3}")
                .trim_end_matches('0')
                .trim_end_matches('.')
                .to_owned()
        })
        .y_label_formatter(&|y| format!("{y:.0e}"))
        .draw()?;
    for (i, line) in lines.iter().enumerate() {
        let colour = COLOURS[i % COLOURS.len()];
        let at = |p: &Point| (p.percent, p.kld);
        chart.draw_series(LineSeries::new(
            line.points.iter().map(at),
            colour.stroke_width(1),
        ))?;
        chart.draw_series(line.points.iter().filter_map(|p| {
            let (low, high) = p.interval?;
            let ends = (low.max(y.start), high.min(y.end));
            Some(PathElement::new(
                vec![(p.percent, ends.0), (p.percent, ends.1)],
                colour.mix(0.5),
            ))
        }))?;
        let text = ("sans-serif", 10).into_font().color(&colour);
        let text = text.pos(Pos::new(HPos::Left, VPos::Bottom));
        chart.draw_series(line.points.iter().map(|p| {
            EmptyElement::at(at(p)) + Text::new(p.parameters.clone(), (6, -3), text.clone())
        }))?;
        // Every second round of colours has hollow marks.
        let filled = (i / COLOURS.len()).is_multiple_of(2);
        let style = ShapeStyle {
            color: colour.to_rgba(),
            filled,
            stroke_width: 2,
        };
        let marks = line.points.iter().map(|p| Circle::new(at(p), 4, style));
        chart
            .draw_series(marks)?
            .label(line.name.clone())
            .legend(move |(x, y)| Circle::new((x + 8, y), 4, style));
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::Coordinate(PANEL.0 as i32 - 345, 4))
        .legend_area_size(22)
        .label_font(("sans-serif", 12))
        .margin(4)
        .draw()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_comes_apart_into_a_name_and_parameters() {
        assert_eq!(
            apart("int4-best gate(kept_fraction=0.5)"),
            ("int4-best gate".to_owned(), "kept_fraction=0.5".to_owned())
        );
        assert_eq!(apart("f16"), ("f16".to_owned(), String::new()));
    }

    #[test]
    fn the_range_of_an_axis_holds_all_values() {
        assert_eq!(span([3.0, 1.5, 9.0].into_iter()), 1.0..13.5);
    }
}

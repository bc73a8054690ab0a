//! The main tables in LaTeX with booktabs: one `table` per group, its conventions in the caption.
//!
//! Invariant: the caption names the model by hash, the protocol, the data, n and the seeds, so that the table can stand
//! alone; it needs nothing but `\usepackage{booktabs}`.

use std::collections::BTreeSet;

use super::columns::{COLUMNS, Column, TextRow, text};
use super::conventions::{arithmetic, data, protocol, short};
use super::rows::{Group, Report};

/// All groups.
pub fn results(report: &Report) -> String {
    let mut out = String::from("% Needs \\usepackage{booktabs}.\n");
    for (i, group) in report.groups.iter().enumerate() {
        out.push('\n');
        out.push_str(&table(report, group, i + 1));
    }
    out
}

fn table(report: &Report, group: &Group, number: usize) -> String {
    let for_papers: Vec<Column> = COLUMNS
        .iter()
        .filter(|c| !c.tex.is_empty())
        .copied()
        .collect();
    let text = text(group, &for_papers, |column| column.tex);
    let n = text.heads.len();
    let mut body = String::new();
    for row in &text.rows {
        match row {
            TextRow::Cells(cells) => {
                let cells: Vec<String> = cells.iter().map(|cell| escape(cell)).collect();
                body.push_str(&format!("{} \\\\\n", cells.join(" & ")));
            }
            TextRow::Reason(label, reason) if n > 1 => body.push_str(&format!(
                "{} & \\multicolumn{{{}}}{{l}}{{{}}} \\\\\n",
                escape(label),
                n - 1,
                escape(reason)
            )),
            TextRow::Reason(label, reason) => {
                body.push_str(&format!("{} ({}) \\\\\n", escape(label), escape(reason)));
            }
        }
    }
    format!(
        "\\begin{{table}}\n\\centering\n\\caption{{{}}}\n\\label{{tab:{}-{number}}}\n\\begin{{tabular}}{{l{}}}\n\
         \\toprule\n{} \\\\\n\\midrule\n{body}\\bottomrule\n\\end{{tabular}}\n\\end{{table}}\n",
        caption(report, group),
        report.header.experiment,
        "r".repeat(n - 1),
        text.heads.join(" & "),
    )
}

fn caption(report: &Report, group: &Group) -> String {
    let header = &report.header;
    let seeds: BTreeSet<u64> = header.cells.iter().map(|cell| cell.seed).collect();
    let seeds: Vec<String> = seeds.iter().map(u64::to_string).collect();
    let reference = group.baseline.map_or_else(String::new, |b| {
        format!(
            " Reference (f32 rows): PPL {:.4} per token.",
            b.reference_ppl
        )
    });
    let arithmetic = arithmetic(report).map_or_else(String::new, |line| format!(" {line}"));
    let plain = format!(
        "{}, {}. {} (sha256 {}).{arithmetic} {} {}{reference} Brackets hold a 95 % interval over the n items; ΔPPL is paired, p corrected by Holm over the rows; KLD \
         is KL(full ‖ compressed) in nats. Sizes charge every stored byte. Seeds: {}. Bundle {}/{}.",
        header.experiment,
        group.title,
        header.model.name,
        short(&header.model.sha256),
        protocol(group).replace('`', ""),
        data(group),
        seeds.join(", "),
        header.experiment,
        report.run_id,
    );
    escape(&plain)
}

/// Plain text for LaTeX.
fn escape(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '&' | '%' | '$' | '#' | '_' | '{' | '}' => {
                out.push('\\');
                out.push(c);
            }
            '\\' => out.push_str("\\textbackslash{}"),
            '~' => out.push_str("\\textasciitilde{}"),
            '^' => out.push_str("\\textasciicircum{}"),
            '±' => out.push_str("$\\pm$"),
            'Δ' => out.push_str("$\\Delta$"),
            '‖' => out.push_str("$\\|$"),
            '\n' => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_characters_are_escaped() {
        assert_eq!(
            escape("50 % of a_b & {x} \\ ± Δ ‖ ~^"),
            "50 \\% of a\\_b \\& \\{x\\} \\textbackslash{} $\\pm$ $\\Delta$ $\\|$ \\textasciitilde{}\\textasciicircum{}"
        );
    }
}

//! Recall by the depth at which a fact stands and the length of its context.
//!
//! Invariants: a quarter of the depths is a column, a length a row; strategy and reference are judged on the same questions.

use std::collections::BTreeMap;

use crate::bundle::Contents;
use crate::bundle::header::ProtocolKind;
use crate::eval::records::ItemRecord;

use super::accuracy::{is_right_reference, is_right_strategy};
use super::markdown::{plain, table, title};
use super::rows::Report;

/// Quarters of the context.
const QUARTERS: usize = 4;

/// One strategy on one task at one length.
#[derive(Debug, Clone, PartialEq)]
pub struct DepthRow {
    /// The task.
    pub task: String,
    /// The strategy.
    pub label: String,
    /// Tokens of the context.
    pub length: usize,
    /// From the first quarter of the depths to the last.
    pub quarters: [Quarter; QUARTERS],
}

/// Questions of one quarter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Quarter {
    /// Questions.
    pub n: usize,
    /// Right with the strategy.
    pub right: usize,
    /// Right with the reference.
    pub right_reference: usize,
}

/// All rows of a bundle, by task, then strategy in the plan's order, then length; empty unless items have a depth.
pub fn rows(contents: &Contents) -> Vec<DepthRow> {
    let header = &contents.header;
    let mut by_cell: BTreeMap<&str, [Quarter; QUARTERS]> = BTreeMap::new();
    for item in &contents.items {
        if let Some(quarter) = quarter_of(item) {
            let here = &mut by_cell.entry(&item.cell).or_default()[quarter];
            for answer in &item.answers {
                here.n += 1;
                here.right += usize::from(is_right_strategy(answer));
                here.right_reference += usize::from(is_right_reference(answer));
            }
        }
    }
    let length = |protocol: &str| {
        let found = header.protocols.iter().find(|p| p.name == protocol)?;
        match found.kind {
            ProtocolKind::Tasks { length, .. } => Some(length),
            _ => None,
        }
    };
    let mut rows: Vec<(usize, DepthRow)> = Vec::new();
    for (place, cell) in header.cells.iter().enumerate() {
        let found = by_cell.get(cell.id.as_str());
        let Some((quarters, length)) = found.zip(length(&cell.protocol)) else {
            continue;
        };
        // The plan's order is that of a strategy's first cell.
        let first = header.cells.iter().position(|c| c.label == cell.label);
        rows.push((
            first.unwrap_or(place),
            DepthRow {
                task: cell.data.clone(),
                label: cell.label.clone(),
                length,
                quarters: *quarters,
            },
        ));
    }
    rows.sort_by(|(p, a), (q, b)| (&a.task, p, a.length).cmp(&(&b.task, q, b.length)));
    rows.into_iter().map(|(_, row)| row).collect()
}

/// Which quarter an item's depth lies in, where it has one.
fn quarter_of(item: &ItemRecord) -> Option<usize> {
    let depth: f64 = item.effective.get("depth")?.parse().ok()?;
    Some(((depth * QUARTERS as f64) as usize).min(QUARTERS - 1))
}

const HEADS: [&str; 7] = [
    "task",
    "strategy",
    "length",
    "depth 0 … 25 %",
    "25 … 50 %",
    "50 … 75 %",
    "75 … 100 %",
];

/// The rows as a table; empty where no item has a depth.
pub fn markdown(report: &Report) -> String {
    if report.depths.is_empty() {
        return String::new();
    }
    let intro = "Right answers of all questions whose fact stands in that quarter of the context; (full) those of the f32 reference.";
    let mut out = title(report, "recall by depth and length", &[intro.to_owned()]);
    let rows = report.depths.iter().map(|row| {
        let place = [row.task.clone(), row.label.clone(), row.length.to_string()];
        let cells = row.quarters.map(|q| match q.n {
            0 => String::new(),
            n => format!("{} of {n} ({})", q.right, q.right_reference),
        });
        place.into_iter().chain(cells).collect()
    });
    out.push('\n');
    out.push_str(&table(&plain(&HEADS, rows)));
    out
}

/// The rows for programs: a line per quarter; empty where no item has a depth.
pub fn csv(report: &Report) -> String {
    if report.depths.is_empty() {
        return String::new();
    }
    let mut out = "task,strategy,length,quarter,n,right,right_reference\n".to_owned();
    for row in &report.depths {
        let label = row.label.replace('"', "\"\"");
        for (i, q) in row.quarters.iter().enumerate() {
            out.push_str(&format!(
                "{},\"{label}\",{},{},{},{},{}\n",
                row.task,
                row.length,
                i + 1,
                q.n,
                q.right,
                q.right_reference
            ));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bundle::fixture;

    #[test]
    fn quarters_hold_the_depths_from_their_start_on() {
        let at = |depth: &str| {
            let mut item = fixture::items(0, 0).remove(0);
            item.effective.insert("depth".to_owned(), depth.to_owned());
            quarter_of(&item)
        };
        let found = ["0", "0.249", "0.25", "0.5", "0.99", "1"].map(at);
        assert_eq!(found, [0, 0, 1, 2, 3, 3].map(Some));
        assert_eq!(quarter_of(&fixture::items(0, 0)[0]), None);
    }
}

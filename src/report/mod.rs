//! Reports: tables made from a bundle, and from nothing else.
//!
//! Invariants: a report can be made at any time from the raw files, of a finished run or not, and is then the same to
//! the byte; ratios exist only here; no number stands without its n, its unit and its convention.

pub mod accuracy;
pub mod bars;
pub mod bench;
#[cfg(test)]
mod bench_fixture;
pub mod columns;
pub mod conventions;
pub mod csv;
pub mod depths;
pub mod drift;
mod fields;
pub mod figure;
pub mod format;
mod growth;
pub mod kld;
mod latency;
pub mod latex;
pub mod layers;
pub mod lm_eval;
pub mod markdown;
pub mod matches;
pub mod measures;
pub mod pairs;
pub mod positions;
pub mod rows;
pub mod terminal;
pub mod texts;
pub mod traffic;

use std::path::Path;

use crate::bundle::{Bundle, BundleError, write_or_remove};
use rows::Report;

/// A table's file name and writer; an empty text stands for a table that this report does not have.
type Writer = (&'static str, fn(&Report) -> String);

/// Every derived file of a bundle.
pub static FILES: &[Writer] = &[
    ("table.md", markdown::results),
    ("table.csv", csv::results),
    ("table.tex", latex::results),
    ("figure.svg", figure::svg),
    ("drift.md", markdown::drift),
    ("drift.csv", csv::drift),
    ("bars.md", markdown::bars),
    ("bars.csv", csv::bars),
    ("memory.md", markdown::memory),
    ("memory.csv", csv::memory),
    ("memory_track.csv", csv::memory_track),
    ("positions.md", markdown::positions),
    ("positions.csv", csv::positions),
    ("layers.md", layers::markdown),
    ("layers.csv", layers::csv),
    ("latency.md", markdown::latency),
    ("latency.csv", csv::latency),
    ("traffic.md", traffic::markdown),
    ("traffic.csv", traffic::csv),
    ("depths.md", depths::markdown),
    ("depths.csv", depths::csv),
    ("pairs.md", markdown::pairs),
    ("pairs.csv", csv::pairs),
];

/// Reads a bundle, writes all its tables beside the raw files and returns what they are made of.
///
/// # Errors
/// The bundle can't be read, is damaged or does not verify, or the folder can't be written.
pub fn write(bundle: &Path) -> Result<Report, BundleError> {
    let report = Report::new(&Bundle::read(bundle)?);
    for (name, writer) in FILES {
        write_or_remove(&bundle.join(name), writer(&report).as_bytes())?;
    }
    Ok(report)
}

#[cfg(test)]
mod tests;

//! How decoding slows down with depth: a straight line through the times of a strategy's tests, and what its slope says
//! about the speed at which stored rows are read.
//!
//! Invariants: ordinary least squares over the fastest run of each depth (a busy moment makes a run slower, never faster);
//! three depths at least, or no line.

use super::bench::Sheet;
use super::format::significant;
use crate::eval::bench::{Measured, Work};

/// Depths below which a line says nothing.
const LEAST_DEPTHS: usize = 3;

/// y = intercept + slope · x.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Line {
    /// y at x = 0.
    intercept: f64,
    /// y per x.
    slope: f64,
    /// Part of the variance of y that the line explains.
    r_squared: f64,
}

/// The line of least squares; `None` for fewer than three points or equal x.
fn line(points: &[(f64, f64)]) -> Option<Line> {
    let n = points.len() as f64;
    let (mx, my) = points
        .iter()
        .fold((0.0, 0.0), |(x, y), p| (x + p.0 / n, y + p.1 / n));
    let sum =
        |f: &dyn Fn(f64, f64) -> f64| points.iter().map(|p| f(p.0 - mx, p.1 - my)).sum::<f64>();
    let (xx, xy, yy) = (sum(&|x, _| x * x), sum(&|x, y| x * y), sum(&|_, y| y * y));
    let slope = xy / xx;
    (points.len() >= LEAST_DEPTHS && xx > 0.0).then_some(Line {
        intercept: my - slope * mx,
        slope,
        r_squared: if yy > 0.0 { slope * xy / yy } else { 1.0 },
    })
}

/// A sentence for each strategy and number of threads that decoded at three depths or more.
pub fn sentences(sheet: &Sheet) -> Vec<String> {
    let decoded = |row: &&Measured| row.test.work == Work::Decode;
    let mut keys: Vec<(usize, usize)> = Vec::new();
    for row in sheet.rows.iter().filter(decoded) {
        if !keys.contains(&(row.strategy, row.n_threads)) {
            keys.push((row.strategy, row.n_threads));
        }
    }
    let mut all = Vec::new();
    for (strategy, n_threads) in keys {
        let rows: Vec<&Measured> = sheet
            .rows
            .iter()
            .filter(decoded)
            .filter(|r| (r.strategy, r.n_threads) == (strategy, n_threads))
            .collect();
        let seconds = |row: &Measured| {
            let fastest = row.runs.iter().map(|r| r.wall).min().unwrap_or_default();
            fastest.as_secs_f64() / row.test.n as f64
        };
        let by_depth = rows
            .iter()
            .map(|r| (r.test.depth as f64 + r.test.n as f64 / 2.0, seconds(r)));
        let by_bytes = rows.iter().map(|r| (r.attended_bytes, seconds(r)));
        let (Some(depth), Some(bytes)) = (
            line(&by_depth.collect::<Vec<_>>()),
            line(&by_bytes.collect::<Vec<_>>()),
        ) else {
            continue;
        };
        let threads = if n_threads == 1 { "thread" } else { "threads" };
        all.push(format!(
            "growth: {}, {n_threads} {threads}: {} ms + {} us per 1000 tokens of depth ({} depths, R2 {:.4}): stored rows at {} GB/s",
            sheet.entrants[strategy].label,
            significant(1e3 * depth.intercept, 3),
            significant(1e9 * depth.slope, 3),
            rows.len(),
            depth.r_squared,
            significant(1.0 / bytes.slope / 1e9, 3),
        ));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_comes_back_and_noise_lowers_what_it_explains() {
        let exact: Vec<(f64, f64)> = [0.0, 1.0, 5.0, 9.0].map(|x| (x, 2.0 + 0.5 * x)).to_vec();
        let found = line(&exact).unwrap();
        assert!((found.intercept - 2.0).abs() < 1e-12 && (found.slope - 0.5).abs() < 1e-12);
        assert!((found.r_squared - 1.0).abs() < 1e-12);
        // Least squares of (0, 0), (1, 1), (2, 0): flat at 1/3, which explains nothing.
        let bent = line(&[(0.0, 0.0), (1.0, 1.0), (2.0, 0.0)]).unwrap();
        assert!((bent.intercept - 1.0 / 3.0).abs() < 1e-12 && bent.r_squared.abs() < 1e-12);
    }

    #[test]
    fn two_depths_or_one_depth_thrice_make_no_line() {
        assert_eq!(line(&[(0.0, 1.0), (1.0, 2.0)]), None);
        assert_eq!(line(&[(4.0, 1.0), (4.0, 2.0), (4.0, 3.0)]), None);
    }
}

//! What scaled formats learn from calibration rows: largest magnitudes and each channel's middle.
//!
//! Invariant: nothing is ever assumed in the place of a missing or unusable calibration; both are errors.

use super::super::stage::{BuildContext, HeadContext, Kind, StageError};

/// The head that a codec named `name` is built for, with its calibration rows.
pub(super) fn head<'a>(
    name: &str,
    context: &BuildContext<'a>,
) -> Result<HeadContext<'a>, StageError> {
    let covered = |h: &HeadContext<'_>| h.samples.get(h.kv_head).is_some_and(|s| !s.is_empty());
    context
        .head
        .filter(covered)
        .ok_or_else(|| StageError::NoCalibration {
            kind: Kind::Encode,
            name: name.to_owned(),
        })
}

/// The largest magnitude among rows.
///
/// # Errors
/// [`StageError::Parameter`] if it is zero or not finite: no scale follows from it.
pub(super) fn largest(
    name: &str,
    head: &HeadContext<'_>,
    rows: impl Iterator<Item = f32>,
) -> Result<f32, StageError> {
    let amax = rows.fold(0.0f32, |m, x| m.max(x.abs()));
    if amax > 0.0 && amax.is_finite() {
        return Ok(amax);
    }
    Err(StageError::Parameter {
        kind: Kind::Encode,
        name: name.to_owned(),
        problem: format!(
            "the largest magnitude of the calibration rows of layer {}, KV head {} is {amax}, must be above 0 and \
             finite: take another calibration text",
            head.layer, head.kv_head
        ),
    })
}

/// The mean of each channel over rows `[token][dim]`, summed in f64 in order of tokens.
pub(super) fn means(rows: &[f32], dim: usize) -> Vec<f32> {
    let mut sums = vec![0.0f64; dim];
    for row in rows.chunks_exact(dim) {
        for (s, &x) in sums.iter_mut().zip(row) {
            *s += f64::from(x);
        }
    }
    let n = (rows.len() / dim) as f64;
    sums.iter().map(|s| (s / n) as f32).collect()
}

/// The middle between each channel's largest and smallest value over rows `[token][dim]`.
pub(super) fn middles(rows: &[f32], dim: usize) -> Vec<f32> {
    let mut ends = vec![(f32::MAX, f32::MIN); dim];
    for row in rows.chunks_exact(dim) {
        for ((low, high), &x) in ends.iter_mut().zip(row) {
            (*low, *high) = (low.min(x), high.max(x));
        }
    }
    ends.iter().map(|(low, high)| (high + low) / 2.0).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_have_their_own_mean_and_middle() {
        let rows = [1.0, -4.0, 2.0, 0.0, 6.0, 1.0];
        assert_eq!(means(&rows, 2), [3.0, -1.0]);
        assert_eq!(middles(&rows, 2), [3.5, -1.5]);
    }

    #[test]
    fn rows_without_a_scale_are_refused_with_their_head() {
        let head = HeadContext {
            layer: 3,
            kv_head: 1,
            ..HeadContext::any(2)
        };
        assert_eq!(largest("f", &head, [1.0, -2.5].into_iter()).unwrap(), 2.5);
        for (rows, shown) in [([0.0, -0.0], "is 0"), ([1.0, f32::INFINITY], "is inf")] {
            let message = largest("f", &head, rows.into_iter())
                .unwrap_err()
                .to_string();
            assert!(
                message.contains("layer 3, KV head 1") && message.contains(shown),
                "{message}"
            );
        }
    }
}

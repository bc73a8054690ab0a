//! Holm's correction: p values of several hypotheses such that the chance of one false rejection among all is kept.
//!
//! Invariant: a corrected p is never below its own p, keeps the order of the p, and is at most 1.
//!
//! Source: S. Holm, Scandinavian Journal of Statistics 6 (1979). With p₁ ≤ … ≤ pₘ: p̃ᵢ = max over j ≤ i of (m − j + 1)·pⱼ.

/// The corrected p of each, in the order given.
pub fn holm(p: &[f64]) -> Vec<f64> {
    let m = p.len();
    let mut order: Vec<usize> = (0..m).collect();
    order.sort_by(|&i, &j| p[i].total_cmp(&p[j]));
    let mut corrected = vec![0.0; m];
    let mut greatest: f64 = 0.0;
    for (rank, &i) in order.iter().enumerate() {
        greatest = greatest.max((m - rank) as f64 * p[i]).min(1.0);
        corrected[i] = greatest;
    }
    corrected
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 0.01·4 = 0.04; 0.02·3 = 0.06; 0.03·2 = 0.06; 0.04·1 → 0.06 by the running maximum.
    #[test]
    fn by_hand() {
        let got = holm(&[0.04, 0.01, 0.03, 0.02]);
        for (got, want) in got.iter().zip([0.06, 0.04, 0.06, 0.06]) {
            assert!((got - want).abs() < 1e-15, "{got} is not {want}");
        }
        assert_eq!(holm(&[0.3]), [0.3]);
        assert_eq!(holm(&[0.6, 0.7]), [1.0, 1.0]);
        assert!(holm(&[]).is_empty());
    }
}

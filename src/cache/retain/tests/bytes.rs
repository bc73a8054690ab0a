//! Budgets in bytes: the drawn rows that fit.

use super::build;
use crate::cache::stage::{Choice, Costs, LiveRows, Moment, Value};

/// Rows of 10 bytes each, and 7 bytes for a head that has any.
struct TenEach;

impl Costs for TenEach {
    fn bytes(&self, heads: &[Vec<LiveRows<'_>>], choice: &Choice) -> u64 {
        let heads = heads.iter().flatten().zip(choice.gone.iter().flatten());
        let kept = heads.map(|(live, gone)| (live.positions.len() - gone.len()) as u64);
        kept.map(|n| 10 * n + 7 * u64::from(n > 0)).sum()
    }

    fn row_bytes(&self, _: usize, _: usize) -> Vec<[f64; 2]> {
        vec![[5.0; 2]; 3]
    }
}

/// Two heads of six rows, one sink: as many of the highest as fit.
///
/// ```text
/// position    0   1   2   3   4   5
/// head 0      █   9   1   8   7   2     75 bytes keep 0 1 3 4
/// head 1      █   3   1   2   1   6     and 0 5: 60 + 2 · 7 = 74
/// ```
#[test]
fn bytes_keep_what_fits() {
    let per_token = |bytes: f64| {
        let given = [
            ("sinks", Value::Int(1)),
            ("allocate", Value::Text("global".to_owned())),
            ("bytes_per_token", Value::Float(bytes)),
        ];
        build("knorm", &given).unwrap()
    };
    let scores = [[99., 9., 1., 8., 7., 2.], [99., 3., 1., 2., 1., 6.]];
    let positions = [0, 1, 2, 3, 4, 5];
    let live = scores.each_ref().map(|scores| LiveRows {
        positions: &positions,
        scores,
        n_seen: 6,
        n_reached: 6,
        compressed: None,
        moment: Moment::CompressionPoint,
    });
    let given = [
        ("sinks", Value::Int(1)),
        ("allocate", Value::Text("global".to_owned())),
        ("bytes", Value::Int(75)),
    ];
    let stage = build("knorm", &given).unwrap();
    let choice = stage.choose(&[live.to_vec()], &TenEach).unwrap();
    assert_eq!(choice.gone, [[vec![2, 5], vec![1, 2, 3, 4]]]);
    let stage = per_token(33.0 / 6.0);
    let short = stage.choose(&[live.to_vec()], &TenEach).unwrap_err();
    // A sink of each.
    assert_eq!((short.needed_bytes, short.budget_bytes), (34, 33));
    let stage = per_token(1e6);
    let whole = stage.choose(&[live.to_vec()], &TenEach).unwrap();
    assert!(whole.gone.iter().flatten().all(Vec::is_empty));
}

//! Bits by row: the drawn case of `joint.rs`, and what scores and bytes do to bits.

use proptest::prelude::*;

use super::{build, refusal};
use crate::cache::stage::{Choice, Costs, LiveRows, Moment, Shortage, Value};

/// 4, 8 and 16 bytes for K, one more for V, nothing besides.
struct Drawn;

impl Costs for Drawn {
    fn bytes(&self, heads: &[Vec<LiveRows<'_>>], choice: &Choice) -> u64 {
        let mut sum = 0;
        for (l, heads) in heads.iter().enumerate() {
            for (h, live) in heads.iter().enumerate() {
                let gone = &choice.gone[l][h];
                for i in (0..live.positions.len()).filter(|i| !gone.contains(i)) {
                    let [k, v] = choice.levels[l][h][i].map(|level| 4u64 << level);
                    sum += k + v + 1;
                }
            }
        }
        sum
    }

    fn row_bytes(&self, _: usize, _: usize) -> Vec<[f64; 2]> {
        vec![[4.0, 5.0], [8.0, 9.0], [16.0, 17.0]]
    }
}

fn chosen(given: &[(&str, Value)], heads: &[Vec<f32>]) -> Result<Choice, Shortage> {
    let mut params = vec![
        ("score", Value::Text("kvzip_plus".to_owned())),
        ("sinks", Value::Int(0)),
        ("recent", Value::Int(0)),
    ];
    params.extend_from_slice(given);
    let stage = build("joint", &params).unwrap();
    assert!(stage.chooses_levels() && stage.acts_once());
    let positions: Vec<u32> = (0..heads[0].len() as u32).collect();
    let live = |scores| LiveRows {
        positions: &positions,
        scores,
        n_seen: positions.len() as u32,
        n_reached: positions.len() as u32,
        compressed: None,
        moment: Moment::CompressionPoint,
    };
    stage.choose(&[heads.iter().map(|s| live(s)).collect()], &Drawn)
}

fn within(bytes: i64, scores: &[f32]) -> (Vec<usize>, Vec<[u8; 2]>) {
    let choice = chosen(&[("bytes", Value::Int(bytes))], &[scores.to_vec()]).unwrap();
    (choice.gone[0][0].clone(), choice.levels[0][0].clone())
}

/// Scores whose power of 3/4 is this.
fn weighing(weights: [f32; 4]) -> [f32; 4] {
    weights.map(|w| w.powf(4.0 / 3.0))
}

#[test]
fn the_drawn_rows_get_the_drawn_bits() {
    let scores = weighing([1.0, 4.0, 16.0, 256.0]);
    for bytes in [30, 31, 37] {
        let (gone, levels) = within(bytes, &scores);
        assert_eq!(gone, [0, 1], "{bytes}");
        assert_eq!(levels[2..], [[1, 0], [1, 1]], "{bytes}");
    }
    for bytes in [26, 29] {
        let (gone, levels) = within(bytes, &scores);
        assert_eq!(gone, [0, 1], "{bytes}");
        assert_eq!(levels[2..], [[0, 0], [1, 1]], "{bytes}");
    }
    // The next byte worth having is of the heaviest row's key.
    assert_eq!(within(38, &scores).1[2..], [[1, 0], [2, 1]]);
    assert_eq!(within(4 * 33, &scores), (vec![], vec![[2, 2]; 4]));
    assert_eq!(within(4 * 33 - 1, &scores).1[3], [2, 2]);
}

#[test]
fn protected_rows_have_four_bits_and_each_head_a_row() {
    let scores = vec![0.0, 9.0, 0.0, 3.0];
    let given = [("sinks", Value::Int(1)), ("bytes", Value::Int(18 + 9))];
    let mut heads = vec![scores.clone()];
    let choice = chosen(&given, &heads).unwrap();
    assert_eq!(
        (&choice.gone[0][0][..], choice.levels[0][0][0]),
        (&[2, 3][..], [1, 1])
    );
    // Two heads without protection and bytes for two rows.
    heads.push(vec![0.0; 4]);
    let choice = chosen(&[("bytes", Value::Int(18))], &heads).unwrap();
    assert_eq!(choice.gone[0], [vec![0, 2, 3], vec![0, 1, 2]]);
    let short = chosen(&[("bytes_per_token", Value::Float(4.0))], &heads).unwrap_err();
    assert_eq!((short.needed_bytes, short.budget_bytes), (18, 16));
}

#[test]
fn rows_of_a_sliding_window_stay_and_take_no_room_by_their_scores() {
    let scores = weighing([1.0, 4.0, 16.0, 256.0]).to_vec();
    // Two heads that nothing compares with the first: rows of 4 bits, 17 bytes each.
    for beyond in [f32::INFINITY, f32::MAX] {
        let heads = [scores.clone(), vec![beyond; 4], vec![beyond; 4]];
        let choice = chosen(&[("bytes", Value::Int(37 + 8 * 17))], &heads).unwrap();
        let alone = within(37, &scores);
        assert_eq!(
            (choice.gone[0][0].clone(), choice.levels[0][0].clone()),
            alone
        );
        for head in 1..3 {
            assert_eq!(choice.gone[0][head], [0usize; 0]);
            assert_eq!(choice.levels[0][head], [[1, 1]; 4]);
        }
        let short = chosen(&[("bytes", Value::Int(8 * 17))], &heads).unwrap_err();
        assert!(short.needed_bytes > 8 * 17, "{short:?}");
    }
}

#[test]
fn what_it_can_t_be_built_from_is_refused() {
    let kvzip = ("score", Value::Text("kvzip_plus".to_owned()));
    let file = ("file", Value::Text("random".to_owned()));
    let bytes = ("bytes", Value::Int(9));
    for (given, part) in [
        (
            vec![file.clone()],
            "it has no budget: give `bytes` (of a sequence) or `bytes_per_token`",
        ),
        (
            vec![bytes.clone()],
            "retain stage `joint`: it has no `file`: train one",
        ),
        (
            vec![kvzip, file.clone(), bytes.clone()],
            "reads no `file`: leave it out",
        ),
        (
            vec![file, bytes, ("bytes_per_token", Value::Float(3.0))],
            "`bytes` = 9 and `bytes_per_token` = 3 are two budgets",
        ),
    ] {
        let text = refusal("joint", &given);
        assert!(text.contains(part), "no `{part}` in {text}");
    }
}

proptest! {
    #[test]
    fn higher_scores_have_no_fewer_bits_and_more_bytes_take_none(
        scores in prop::collection::vec(0.0f32..9.0, 2..40),
        fewer in 9i64..600,
        more in 0i64..300,
    ) {
        let bits = |bytes: i64| -> Vec<[u8; 2]> {
            let (gone, levels) = within(bytes, &scores);
            let bits = levels.iter().enumerate();
            bits.map(|(i, l)| if gone.contains(&i) { [0; 2] } else { l.map(|l| l + 1) }).collect()
        };
        let (few, many) = (bits(fewer), bits(fewer + more));
        let total = |bits: &[[u8; 2]]| bits.iter().flatten().map(|&b| u64::from(b)).sum::<u64>();
        prop_assert!(total(&few) <= total(&many));
        for (i, a) in scores.iter().enumerate() {
            for (j, b) in scores.iter().enumerate() {
                if a > b {
                    prop_assert!((0..2).all(|s| many[i][s] >= many[j][s]), "{scores:?} {many:?}");
                }
            }
        }
    }
}

//! The integer codecs against their definition in f64, group by group, on both axes and at widths that leave partial
//! groups and partial bytes.

use std::sync::Arc;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::cache::encode::STAGES;
use crate::cache::encode::fixture::build;
use crate::cache::stage::{Codec, PageCodec, Params, RowCodec, Value};

fn built(name: &str, given: &[(&str, Value)]) -> Result<Codec, String> {
    let def = STAGES.iter().find(|d| d.name == name).unwrap();
    let given = given.iter().map(|(k, v)| ((*k).to_owned(), v.clone()));
    let params = Params::resolve(def, &Params(given.collect())).unwrap();
    build(def, &params, 64).map_err(|e| e.to_string())
}

fn text(word: &str) -> Value {
    Value::Text(word.to_owned())
}

fn by_token(name: &str, group: i64, zero: &str, scales: &str) -> Arc<dyn RowCodec> {
    let given = [
        ("group", Value::Int(group)),
        ("zero", text(zero)),
        ("scales", text(scales)),
    ];
    match built(name, &given) {
        Ok(Codec::Rows(codec)) => codec,
        _ => panic!("{name} by token codes rows"),
    }
}

fn by_channel(
    name: &str,
    (page, group): (i64, i64),
    zero: &str,
    scales: &str,
) -> Arc<dyn PageCodec> {
    let given = [
        ("axis", text("channel")),
        ("page", Value::Int(page)),
        ("group", Value::Int(group)),
        ("zero", text(zero)),
        ("scales", text(scales)),
    ];
    match built(name, &given) {
        Ok(Codec::Pages(codec)) => codec,
        _ => panic!("{name} by channel codes pages"),
    }
}

/// Rows with an offset and a size per channel, as keys have.
fn rows(n: usize, dim: usize, seed: u64) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let channels: Vec<(f32, f32)> = (0..dim)
        .map(|_| (rng.random_range(-4.0..4.0), rng.random_range(0.01..3.0)))
        .collect();
    (0..n * dim)
        .map(|i| {
            let (offset, size) = channels[i % dim];
            offset + size * (0..4).map(|_| rng.random_range(-1.0f32..1.0)).sum::<f32>()
        })
        .collect()
}

fn row_trip(codec: &dyn RowCodec, row: &[f32]) -> Vec<f32> {
    let mut bytes = vec![0xa5; codec.row_bytes(row.len())];
    codec.encode(row, &mut bytes);
    let mut back = vec![f32::NAN; row.len()];
    codec.decode(&bytes, &mut back);
    back
}

fn page_trip(codec: &dyn PageCodec, rows: &[f32], dim: usize) -> Vec<f32> {
    let mut bytes = vec![0xa5; codec.page_bytes(rows.len() / dim, dim)];
    codec.encode(rows, dim, &mut bytes);
    let mut back = vec![f32::NAN; rows.len()];
    codec.decode(&bytes, dim, &mut back);
    back
}

/// The error that a group from min to max may have: half a step of the grid as it may be stored, and rounding in f32.
fn bound(x: &[f32], bits: u32, zero: &str, scales: &str) -> f64 {
    let min = f64::from(x.iter().copied().fold(f32::INFINITY, f32::min));
    let max = f64::from(x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let magnitude = max.abs().max(min.abs());
    let (span, n_steps) = match zero {
        "symmetric" => (magnitude, f64::from((1u32 << (bits - 1)) - 1)),
        _ => (max - min, f64::from((1u32 << bits) - 1)),
    };
    // By how much a number may grow when it is rounded outwards, and the smallest one.
    let (grows, smallest) = match scales {
        "f16" => (2f64.powi(-10), 2f64.powi(-24)),
        "bf16" => (2f64.powi(-7), 0.0),
        _ => (2f64.powi(-3), 2f64.powi(-9)),
    };
    let zero_moves = match zero {
        "symmetric" => 0.0,
        _ => magnitude * grows + smallest,
    };
    let step = (span + zero_moves) / n_steps * (1.0 + grows) + smallest;
    step / 2.0 + magnitude * 2f64.powi(-22)
}

const NAMES: [(&str, u32); 4] = [("int2", 2), ("int3", 3), ("int4", 4), ("int8", 8)];
const ZEROS: [&str; 2] = ["asymmetric", "symmetric"];
const SCALES: [&str; 3] = ["f16", "bf16", "fp8"];

#[test]
fn channels_of_a_row_are_off_by_half_a_step_of_their_group() {
    for (name, bits) in NAMES {
        for (zero, scales) in ZEROS.iter().flat_map(|z| SCALES.map(|s| (*z, s))) {
            for (dim, group) in [
                (20, 64),
                (33, 32),
                (80, 64),
                (64, 16),
                (256, 64),
                (256, 128),
                (1, 8),
            ] {
                let codec = by_token(name, group as i64, zero, scales);
                let row = rows(1, dim, dim as u64);
                let back = row_trip(&*codec, &row);
                for (x, y) in row.chunks(group).zip(back.chunks(group)) {
                    let bound = bound(x, bits, zero, scales);
                    for (x, y) in x.iter().zip(y) {
                        let off = f64::from((x - y).abs());
                        assert!(
                            off <= bound,
                            "{name} {zero} {scales} {dim}/{group}: {x} {y} {bound}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn rows_of_a_channel_are_off_by_half_a_step_of_their_group() {
    for (name, bits) in NAMES {
        for (zero, scales) in ZEROS.iter().flat_map(|z| SCALES.map(|s| (*z, s))) {
            for (dim, n, page, group) in [
                (20, 32, 32, 32),
                (33, 40, 128, 32),
                (80, 128, 128, 128),
                (256, 7, 16, 8),
            ] {
                let codec = by_channel(name, (page, group), zero, scales);
                let (group, page) = (group as usize, rows(n, dim, dim as u64));
                let back = page_trip(&*codec, &page, dim);
                for first in (0..n).step_by(group) {
                    for c in 0..dim {
                        let column = |p: &[f32]| -> Vec<f32> {
                            (first..n.min(first + group))
                                .map(|r| p[r * dim + c])
                                .collect()
                        };
                        let (x, y) = (column(&page), column(&back));
                        let bound = bound(&x, bits, zero, scales);
                        for (x, y) in x.iter().zip(&y) {
                            let off = f64::from((x - y).abs());
                            assert!(
                                off <= bound,
                                "{name} {zero} {scales} {dim}: {x} {y} {bound}"
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn sizes_are_those_of_the_header() {
    for (name, bits) in NAMES {
        let bits = bits as usize;
        for dim in [20, 33, 64, 80, 256] {
            let n_groups = usize::div_ceil(dim, 64);
            for (zero, per_group) in [("asymmetric", 4), ("symmetric", 2)] {
                let codec = by_token(name, 64, zero, "f16");
                assert_eq!(codec.scale_bytes(dim), n_groups * per_group);
                assert_eq!(
                    codec.row_bytes(dim),
                    (dim * bits).div_ceil(8) + n_groups * per_group
                );
                let codec = by_channel(name, (128, 32), zero, "fp8");
                for n in [1, 32, 33, 128] {
                    let scales = usize::div_ceil(n, 32) * dim * per_group / 2;
                    assert_eq!(codec.scale_bytes(n, dim), scales);
                    assert_eq!(
                        codec.page_bytes(n, dim),
                        n * (dim * bits).div_ceil(8) + scales
                    );
                }
            }
        }
    }
    let bits_per_channel = |bytes: usize, n: usize| 8.0 * bytes as f64 / n as f64;
    let page = by_channel("int4", (128, 128), "asymmetric", "f16").page_bytes(128, 64);
    assert_eq!(bits_per_channel(page, 128 * 64), 4.25);
    assert_eq!(
        bits_per_channel(by_token("int4", 64, "asymmetric", "f16").row_bytes(64), 64),
        4.5
    );
    assert_eq!(
        bits_per_channel(
            by_channel("int2", (128, 32), "asymmetric", "f16").page_bytes(128, 64),
            8192
        ),
        3.0
    );
}

#[test]
fn int2_symmetric_has_three_levels() {
    let codec = by_token("int2", 64, "symmetric", "f16");
    let row = [-2.0, -1.1, -0.9, 0.0, 0.9, 1.0, 1.1, 1.5];
    let back = row_trip(&*codec, &row);
    // 1.0 is half a step: it goes to the even code, that of 0.
    assert_eq!(back, [-2.0, -2.0, 0.0, 0.0, 0.0, 0.0, 2.0, 2.0]);
}

#[test]
fn halves_go_to_the_even_code_and_ends_are_hit() {
    let codec = by_token("int4", 64, "asymmetric", "f16");
    let row = [-3.0, -2.5, -1.5, -0.5, 0.5, 1.25, 11.5, 12.0];
    let mut bytes = vec![0xee; codec.row_bytes(8)];
    codec.encode(&row, &mut bytes);
    // Zero −3 and step 1: codes 0, 0, 2, 2, 4, 4, 14, 15; the even channel is low.
    assert_eq!(bytes[..4], [0x00, 0x22, 0x44, 0xfe]);
    assert_eq!(bytes[4..6], half::f16::ONE.to_le_bytes());
    assert_eq!(bytes[6..], half::f16::from_f32(-3.0).to_le_bytes());
}

#[test]
fn a_row_s_codes_do_not_depend_on_other_groups() {
    let codec = by_token("int3", 16, "asymmetric", "bf16");
    let mut row = rows(1, 40, 9);
    let before = row_trip(&*codec, &row);
    row[20] = 50.0;
    let after = row_trip(&*codec, &row);
    assert_eq!(before[..16], after[..16]);
    assert_eq!(before[32..], after[32..]);
    assert_ne!(before[16..32], after[16..32]);
}

#[test]
fn groups_of_one_value_and_of_zeros_come_back() {
    for (name, _) in NAMES {
        for scales in SCALES {
            for x in [0.0, 1.5, -0.25] {
                let row = [x; 33];
                assert_eq!(
                    row_trip(&*by_token(name, 32, "asymmetric", scales), &row),
                    row
                );
                let page = [x; 3 * 20];
                let codec = by_channel(name, (8, 8), "asymmetric", scales);
                assert_eq!(page_trip(&*codec, &page, 20), page);
            }
            assert_eq!(
                row_trip(&*by_token(name, 32, "symmetric", scales), &[0.0; 33]),
                [0.0; 33]
            );
        }
    }
}

#[test]
fn huge_rows_stay_finite() {
    for (name, _) in NAMES {
        for (zero, scales) in ZEROS.iter().flat_map(|z| SCALES.map(|s| (*z, s))) {
            let row = [
                f32::MAX,
                -f32::MAX,
                1e30,
                0.0,
                1e5,
                -1e6,
                f32::MIN_POSITIVE,
                3.0,
            ];
            let back = row_trip(&*by_token(name, 64, zero, scales), &row);
            assert!(
                back.iter().all(|y| y.is_finite()),
                "{name} {zero} {scales} {back:?}"
            );
        }
    }
}

#[test]
fn parameters_that_do_not_go_together_are_refused() {
    let refusal = |given: &[(&str, Value)]| match built("int4", given) {
        Ok(_) => panic!("it was built"),
        Err(e) => e,
    };
    let message = refusal(&[("group", Value::Int(20))]);
    assert!(
        message.contains("`group` is 20, must be a multiple of 8"),
        "{message}"
    );
    let message = refusal(&[("page", Value::Int(32))]);
    assert!(message.contains("axis = \"channel\""), "{message}");
    for (page, group) in [(96, 32), (64, 48), (32, 64), (128, 256)] {
        let message = refusal(&[
            ("axis", text("channel")),
            ("page", Value::Int(page)),
            ("group", Value::Int(group)),
        ]);
        assert!(message.contains("must divide 128"), "{message}");
    }
    let Ok(Codec::Pages(codec)) = built("int4", &[("axis", text("channel"))]) else {
        panic!("a page codec");
    };
    assert_eq!(codec.page_rows(), 128);
    for key in ["group", "page"] {
        let given = [("axis", text("channel")), (key, Value::Int(32))];
        let Ok(Codec::Pages(codec)) = built("int4", &given) else {
            panic!("a page codec");
        };
        assert_eq!(codec.page_rows(), 32);
        assert_eq!(codec.scale_bytes(32, 10), 40);
    }
}

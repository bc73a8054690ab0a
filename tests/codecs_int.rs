//! Codecs against what a numpy script made from their definitions: integer codes, steps and zeros to the bit, turbo's
//! levels, kvquant's levels and codes; and integer groups against KIVI's own arithmetic, which is f16 throughout.

use half::f16;
use kvlab::cache::Geometry;
use kvlab::cache::stage::{
    BuildContext, Codec, HeadContext, KeyForm, Kind, Params, Side, Stage, Value, find,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use safetensors::SafeTensors;

const GOLDEN: &[u8] = include_bytes!("golden/int.safetensors");

/// A case's name: int.BITS.AXIS.ZERO.SCALES.ROWS.DIM.GROUP.
struct Case<'a> {
    bits: usize,
    axis: &'a str,
    zero: &'a str,
    scales: &'a str,
    n: usize,
    dim: usize,
    group: usize,
}

impl<'a> Case<'a> {
    fn parse(name: &'a str) -> Option<Self> {
        let parts: Vec<&str> = name.strip_suffix(".codes")?.split('.').collect();
        let number = |i: usize| parts[i].parse().unwrap();
        Some(Self {
            bits: number(1),
            axis: parts[2],
            zero: parts[3],
            scales: parts[4],
            n: number(5),
            dim: number(6),
            group: number(7),
        })
    }

    fn codec(&self) -> Codec {
        let text = |s: &str| Value::Text(s.to_owned());
        let mut given = vec![
            ("axis", text(self.axis)),
            ("zero", text(self.zero)),
            ("scales", text(self.scales)),
            ("group", Value::Int(self.group as i64)),
        ];
        if self.axis == "channel" {
            given.push(("page", Value::Int(128)));
        }
        let name = format!("int{}", self.bits);
        built(&name, &given, Side::K, (self.dim, &[]))
    }

    /// Steps and zeros are [row][group of channels] or [group of rows][channel].
    fn group_of(&self, row: usize, channel: usize) -> usize {
        if self.axis == "token" {
            row * self.dim.div_ceil(self.group) + channel / self.group
        } else {
            row / self.group * self.dim + channel
        }
    }
}

fn built(
    name: &str,
    given: &[(&str, Value)],
    side: Side,
    (dim, samples): (usize, &[Vec<f32>]),
) -> Codec {
    let def = find(Kind::Encode, name).unwrap();
    let given = given.iter().map(|(k, v)| ((*k).to_owned(), v.clone()));
    let params = Params::resolve(def, &Params(given.collect())).unwrap();
    let context = BuildContext {
        geometry: &Geometry { layers: Vec::new() },
        keys: KeyForm::PostRope,
        side,
        calibration: None,
        backing_dir: None,
        head: Some(HeadContext {
            samples,
            ..HeadContext::any(dim)
        }),
    };
    match (def.build)(&params, &context).unwrap() {
        Stage::Encode(codec) => codec,
        _ => panic!("{name} is not a codec"),
    }
}

/// Normal random numbers.
fn noise(n: usize, seed: u64) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..n)
        .map(|_| (0..12).map(|_| rng.random_range(-0.5f32..0.5)).sum())
        .collect()
}

fn doubles(name: &str) -> Vec<f64> {
    let file = SafeTensors::deserialize(GOLDEN).unwrap();
    let view = file.tensor(name).unwrap();
    let bytes = view.data().as_chunks().0.iter();
    bytes.map(|b| f64::from_le_bytes(*b)).collect()
}

fn floats(name: &str) -> Vec<f32> {
    let file = SafeTensors::deserialize(GOLDEN).unwrap();
    let view = file.tensor(name).unwrap();
    let bytes = view.data().as_chunks().0.iter();
    bytes.map(|b| f32::from_le_bytes(*b)).collect()
}

fn halves(name: &str) -> Vec<f32> {
    let file = SafeTensors::deserialize(GOLDEN).unwrap();
    let view = file.tensor(name).unwrap();
    let bytes = view.data().as_chunks().0.iter();
    bytes.map(|b| f16::from_le_bytes(*b).to_f32()).collect()
}

/// Bytes and decoded rows, whichever the axis.
fn coded(codec: &Codec, x: &[f32], dim: usize) -> (Vec<u8>, Vec<f32>) {
    let n = x.len() / dim;
    let mut back = vec![f32::NAN; x.len()];
    let bytes = match codec {
        Codec::Rows(codec) => {
            let row_bytes = codec.row_bytes(dim);
            let mut bytes = vec![0xee; n * row_bytes];
            for (row, out) in x.chunks(dim).zip(bytes.chunks_mut(row_bytes)) {
                codec.encode(row, out);
            }
            codec.decode_rows(&bytes, dim, &mut back);
            bytes
        }
        Codec::Pages(codec) => {
            let mut bytes = vec![0xee; codec.page_bytes(n, dim)];
            codec.encode(x, dim, &mut bytes);
            codec.decode(&bytes, dim, &mut back);
            bytes
        }
    };
    (bytes, back)
}

/// Row r's bytes from its first code on.
fn row_bytes<'a>(case: &Case<'_>, codec: &Codec, bytes: &'a [u8], r: usize) -> &'a [u8] {
    let stride = match codec {
        Codec::Rows(codec) => codec.row_bytes(case.dim),
        Codec::Pages(_) => (case.dim * case.bits).div_ceil(8),
    };
    &bytes[r * stride..]
}

/// Code i of a stream of bits, bit by bit.
fn code_at(stream: &[u8], bits: usize, i: usize) -> u8 {
    let bit = |at: usize| stream[at / 8] >> (at % 8) & 1;
    (0..bits).map(|b| bit(i * bits + b) << b).sum()
}

#[test]
fn codes_steps_and_zeros_are_those_of_the_definition() {
    let file = SafeTensors::deserialize(GOLDEN).unwrap();
    let names = file.names();
    let cases: Vec<(&str, Case)> = names
        .iter()
        .filter(|n| n.starts_with("int."))
        .filter_map(|n| Some((*n, Case::parse(n)?)))
        .collect();
    assert_eq!(cases.len(), 4 * (9 + 4 * 2));
    for (name, case) in cases {
        let key = name.strip_suffix(".codes").unwrap();
        let x = floats(&format!("x.{}.{}", case.n, case.dim));
        let codes = file.tensor(name).unwrap().data().to_vec();
        let steps = floats(&format!("{key}.step"));
        let zeros = floats(&format!("{key}.zero"));
        let codec = case.codec();
        let (bytes, back) = coded(&codec, &x, case.dim);
        for r in 0..case.n {
            let stream = row_bytes(&case, &codec, &bytes, r);
            for c in 0..case.dim {
                let at = r * case.dim + c;
                let got = code_at(stream, case.bits, c);
                assert_eq!(got, codes[at], "{key} row {r} channel {c}");
                let group = case.group_of(r, c);
                // Exact in f64: one rounding, as that of a fused product and sum.
                let exact =
                    f64::from(codes[at]) * f64::from(steps[group]) + f64::from(zeros[group]);
                assert_eq!(back[at], exact as f32, "{key} row {r} channel {c}");
            }
        }
    }
}

#[test]
fn kivi_s_own_arithmetic_gives_nearly_the_same_rows() {
    let x = halves("kivi.x");
    for bits in [2, 4] {
        for (axis, key) in [("channel", "k"), ("token", "v")] {
            let case = Case {
                bits,
                axis,
                zero: "asymmetric",
                scales: "f16",
                n: 128,
                dim: 64,
                group: 32,
            };
            let (_, back) = coded(&case.codec(), &x, 64);
            let kivi = halves(&format!("kivi.{bits}.{key}"));
            let (mut n_other_codes, mut n_equal) = (0, 0);
            for (at, (got, want)) in back.iter().zip(&kivi).enumerate() {
                let (r, c) = (at / 64, at % 64);
                let group: Vec<f32> = (0..32)
                    .map(|i| match axis {
                        "token" => x[r * 64 + c / 32 * 32 + i],
                        _ => x[(r / 32 * 32 + i) * 64 + c],
                    })
                    .collect();
                let low = group.iter().copied().fold(f32::INFINITY, f32::min);
                let high = group.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let step = (high - low) / ((1 << bits) - 1) as f32;
                // f16 rounds step, quotient, product and sum: a quotient within 1/128 of a half may get the other code.
                let rounding = 2f32.powi(-10) * (low.abs() + high.abs());
                let off = (got - want).abs();
                assert!(
                    off <= step * 1.001 + rounding,
                    "{bits} {key} {at}: {got} {want}"
                );
                n_other_codes += usize::from(off > rounding);
                n_equal += usize::from(f16::from_f32(*got).to_f32() == *want);
            }
            assert!(
                n_other_codes * 32 < x.len(),
                "{bits} {key}: {n_other_codes}"
            );
            assert!(n_equal * 4 > x.len(), "{bits} {key}: {n_equal} equal");
        }
    }
}

#[test]
fn turbo_codes_with_scipy_s_levels_what_its_rotation_gives() {
    for (bits, low, high) in [
        ("2", 2, 2),
        ("2.5", 2, 3),
        ("3", 3, 3),
        ("3.5", 3, 4),
        ("4", 4, 4),
    ] {
        for dim in [4, 20, 33, 64, 128, 256] {
            let rotation = kvlab::cache::rotation::haar(dim, 5);
            let params = [
                ("bits", Value::Text(bits.to_owned())),
                ("seed", Value::Int(5)),
            ];
            let Codec::Rows(codec) = built("turbo", &params, Side::K, (dim, &[])) else {
                panic!("turbo codes rows");
            };
            let n_high = if low == high { 0 } else { dim.div_ceil(2) };
            let high_bytes = (n_high * high).div_ceil(8);
            assert_eq!(
                codec.row_bytes(dim),
                high_bytes + ((dim - n_high) * low).div_ceil(8) + 2
            );
            for seed in 0..8 {
                let row = noise(dim, seed);
                let (bytes, back) = coded(&Codec::Rows(codec.clone()), &row, dim);
                let norm = row
                    .iter()
                    .map(|&x| f64::from(x).powi(2))
                    .sum::<f64>()
                    .sqrt();
                let stored = f16::from_le_bytes([bytes[bytes.len() - 2], bytes[bytes.len() - 1]]);
                assert!((f64::from(stored.to_f32()) / norm - 1.0).abs() < 1e-3);
                // Rotated in f64; a coordinate this close to a border may go either way in f32.
                let mut decoded = vec![0.0f64; dim];
                for i in 0..dim {
                    let z: f64 = (0..dim)
                        .map(|j| rotation[i * dim + j] * f64::from(row[j]))
                        .sum();
                    let z = z / norm * (dim as f64).sqrt();
                    let (stream, b, at) = match i < n_high {
                        true => (&bytes[..], high, i),
                        false => (&bytes[high_bytes..], low, i - n_high),
                    };
                    let levels = doubles(&format!("turbo.{dim}.{b}"));
                    let code = usize::from(code_at(stream, b, at));
                    let nearest = levels
                        .iter()
                        .map(|l| (l - z).abs())
                        .fold(f64::INFINITY, f64::min);
                    let off = (levels[code] - z).abs();
                    assert!(off < nearest + 2e-5, "{bits} {dim}: {z} has code {code}");
                    for (j, x) in decoded.iter_mut().enumerate() {
                        *x += rotation[i * dim + j] * levels[code];
                    }
                }
                let unit = f64::from(stored.to_f32()) / (dim as f64).sqrt();
                for (got, want) in back.iter().zip(decoded) {
                    assert!(
                        (f64::from(*got) - want * unit).abs() < 3e-6 * norm,
                        "{bits} {dim}"
                    );
                }
            }
        }
    }
}

#[test]
fn turbo_has_the_published_distortion_on_unit_vectors() {
    // TurboQuant's table: 0.117, 0.03 and 0.009 for 2, 3 and 4 bits; a half bit is halfway between.
    for (bits, published, unit) in [
        ("2", 0.117, 0.002),
        ("2.5", 0.0735, 0.003),
        ("3", 0.03, 0.005),
        ("4", 0.009, 0.001),
    ] {
        let params = [("bits", Value::Text(bits.to_owned()))];
        let codec = built("turbo", &params, Side::V, (128, &[]));
        let (mut error, n) = (0.0, 400);
        for seed in 0..n {
            let mut row = noise(128, seed);
            let norm = row.iter().map(|x| x * x).sum::<f32>().sqrt();
            row.iter_mut().for_each(|x| *x /= norm);
            let (_, back) = coded(&codec, &row, 128);
            error += row
                .iter()
                .zip(&back)
                .map(|(x, y)| f64::from(x - y).powi(2))
                .sum::<f64>();
        }
        let distortion = error / n as f64;
        assert!(
            (distortion - published).abs() < unit,
            "{bits} bits: {distortion}"
        );
    }
}

#[test]
fn kvquant_fits_and_codes_as_the_script_does() {
    let (samples, x) = (floats("kvquant.samples"), floats("kvquant.x"));
    let samples = [samples];
    for (side, key) in [(Side::K, "k"), (Side::V, "v")] {
        for bits in [2usize, 3, 4] {
            let params = [
                ("bits", Value::Int(bits as i64)),
                ("outliers", Value::Float(0.05)),
            ];
            let Codec::Rows(codec) = built("kvquant", &params, side, (20, &samples)) else {
                panic!("kvquant codes rows");
            };
            let name = |part: &str| format!("kvquant.{key}.{bits}.{part}");
            let file = SafeTensors::deserialize(GOLDEN).unwrap();
            let codes = file.tensor(&name("codes")).unwrap().data().to_vec();
            let outliers = file.tensor(&name("outliers")).unwrap().data().to_vec();
            let values = floats(&name("values"));
            for (r, row) in x.chunks(20).enumerate() {
                let (bytes, back) = coded(&Codec::Rows(codec.clone()), row, 20);
                for (c, &x) in row.iter().enumerate() {
                    let at = r * 20 + c;
                    assert_eq!(
                        code_at(&bytes, bits, c),
                        codes[at],
                        "{key} {bits} row {r} channel {c}: {x}"
                    );
                    assert!(
                        (back[c] - values[at]).abs() <= 2e-6 * (1.0 + x.abs()),
                        "{key} {bits} {at}"
                    );
                }
                let index = (20 * bits).div_ceil(8) + codec.scale_bytes(20);
                assert_eq!(bytes[index], outliers[r], "{key} {bits} row {r}");
                assert_eq!(
                    bytes[index + 1..],
                    f16::from_f32(row[usize::from(outliers[r])]).to_le_bytes()
                );
            }
        }
    }
}

//! `kvquant`: KVQuant's dense-and-sparse coding. A row's few strangest channels are stored as they are; the others are
//! brought to about −1 to 1 and coded by levels that were fitted to a calibration text.
//!
//! Keys are normalised per channel, by the middle and the half width of that channel's calibration rows without their
//! outliers, so that a key can be coded as it comes; values per row, by the row's own middle and half width without its
//! outliers. Levels are fitted per layer and KV head by k-means over normalised calibration rows. The paper weighs each
//! number by its Fisher information; without gradients here all numbers weigh the same. It also keeps keys before RoPE:
//! `keys = "pre_rope"`.
//!
//! Row layout: codes, a stream of bits (`bits.rs`) padded to a whole byte; of values half width and middle,
//! f16; then the outliers' channels in ascending order, one byte each (two if there are over 256 channels), then the
//! outliers, f16. A row of 10 values at 2 bits, one outlier, levels −.8, −.2, .3, .9:
//!
//! ```text
//! x        .1  −.3   .9   .5  9.0  −.7   .2   .4   .0  −.1     mean 1.0: channel 4 is the farthest
//! rest     .1  −.3   .9   .5    ·  −.7   .2   .4   .0  −.1     from −.7 to .9: middle .1, half width .8
//! /        .0  −.5   1.   .5    ·  −1.  .12  .37 −.12 −.25
//! code      1    1    3    2    3    0    2    2    1    1     the outlier has a code, too
//! ```
//!
//! Invariants: every row has exactly round(`outliers` · channels) outliers, at least one unless `outliers` is 0: those
//! farthest from their centre (keys: in half widths from the channel's middle; values: from the row's mean), of equals
//! the first. Values' codes come from the stored half width and middle. Outliers are clamped to f16's range and count
//! with the codes; the half width and middle of values count as scales; levels and the keys' offsets as tables.

use std::sync::Arc;

use half::f16;

use super::super::stage::{
    BuildContext, Codec, Domain, HeadContext, Kind, ParamDef, Params, RowCodec, Side, Stage,
    StageDef, StageError, Tolerance, always,
};
use super::bits::stream_bytes;
use super::levels::{self, Levels, look_up, nearest};

/// The registry entry.
pub const DEF: StageDef = StageDef {
    name: "kvquant",
    kind: Kind::Encode,
    doc: "KVQuant: levels fitted to a calibration text (all numbers weigh the same), outliers kept sparse",
    paper: "KVQuant, arXiv 2401.18079, without its Fisher weights",
    params: &[
        ParamDef {
            name: "bits",
            domain: Domain::Int { min: 2, max: 4 },
            default: Some("4"),
            doc: "bits of a code",
        },
        ParamDef {
            name: "outliers",
            domain: Domain::Share { max: 0.5 },
            default: Some("0.01"),
            doc: "share of a row's channels that stay exact, at least one unless it is 0",
        },
    ],
    calibrated: always,
    examples: &[
        "\"kvquant\"",
        "{ method = \"kvquant\", bits = 2, outliers = 0.05 }",
    ],
    tolerance: Tolerance::RelativeL2(0.5),
    build,
};

/// The codec of one KV head's keys or values.
#[derive(Debug, Clone)]
pub struct KvQuant {
    levels: Levels,
    outliers: f64,
    /// Of keys; values are normalised row by row.
    channels: Option<Channels>,
}

/// Keys' middles and half widths, by channel; no half width is 0.
#[derive(Debug, Clone)]
struct Channels {
    middle: Vec<f32>,
    width: Vec<f32>,
}

fn build(params: &Params, context: &BuildContext<'_>) -> Result<Stage, StageError> {
    let stage = || (Kind::Encode, DEF.name.to_owned());
    let refused = |problem: String| {
        let (kind, name) = stage();
        StageError::Parameter {
            kind,
            name,
            problem,
        }
    };
    let samples = context.head.and_then(|head| {
        let rows = head.samples.get(head.kv_head)?;
        (!rows.is_empty()).then_some((head, rows))
    });
    let Some((
        HeadContext {
            layer,
            kv_head,
            dim,
            ..
        },
        rows,
    )) = samples
    else {
        let (kind, name) = stage();
        return Err(StageError::NoCalibration { kind, name });
    };
    if rows.len() % dim != 0 || rows.iter().any(|x| !x.is_finite()) {
        return Err(refused(format!(
            "layer {layer}, KV head {kv_head}: the calibration rows are not finite or not of {dim} channels: calibrate with this model"
        )));
    }
    let outliers = params.float("outliers").unwrap_or(0.01);
    let bits = params.int("bits").map_or(4, |b| b.unsigned_abs() as usize);
    let mut codec = KvQuant {
        // Stands in until the numbers that are coded are known.
        levels: Levels::new(&[0.0, 0.0]),
        outliers,
        channels: (context.side == Side::K).then(|| Channels::fit(rows, dim, outliers)),
    };
    let mut numbers = Vec::with_capacity(rows.len());
    for row in rows.chunks_exact(dim) {
        let outliers = codec.strangest(row);
        let (normalised, ..) = codec.normalised(row, &outliers);
        let mut skipped = outliers.iter().peekable();
        for (i, &x) in normalised.iter().enumerate() {
            if skipped.next_if_eq(&&i).is_none() {
                numbers.push(f64::from(x));
            }
        }
    }
    numbers.sort_by(f64::total_cmp);
    codec.levels = Levels::new(&levels::of_sorted(&numbers, bits));
    Ok(Stage::Encode(Codec::Rows(Arc::new(codec))))
}

impl Channels {
    /// From rows `[token][dim]`: the middle of what is left of a channel without a share of `outliers` at its ends.
    fn fit(rows: &[f32], dim: usize, outliers: f64) -> Self {
        let n = rows.len() / dim;
        let n_cut = ((n as f64 * outliers / 2.0) as usize).min((n - 1) / 2);
        let (mut middle, mut width) = (Vec::with_capacity(dim), Vec::with_capacity(dim));
        for c in 0..dim {
            let mut column: Vec<f32> = rows[c..].iter().step_by(dim).copied().collect();
            column.sort_by(f32::total_cmp);
            let (low, high) = (column[n_cut], column[n - 1 - n_cut]);
            middle.push(low / 2.0 + high / 2.0);
            let half = high / 2.0 - low / 2.0;
            width.push(if half > 0.0 { half } else { 1.0 });
        }
        Self { middle, width }
    }
}

/// The middle and the half width of a row's channels that are no outliers, rounded to f16.
fn middle_and_width(row: &[f32], outliers: &[usize]) -> (f16, f16) {
    let (mut low, mut high) = (f32::INFINITY, f32::NEG_INFINITY);
    let mut skipped = outliers.iter().peekable();
    for (i, &x) in row.iter().enumerate() {
        if skipped.next_if_eq(&&i).is_none() {
            low = low.min(x);
            high = high.max(x);
        }
    }
    if low > high {
        return (f16::ZERO, f16::ZERO);
    }
    (
        to_f16(low / 2.0 + high / 2.0),
        to_f16(high / 2.0 - low / 2.0),
    )
}

/// The nearest finite half.
fn to_f16(x: f32) -> f16 {
    f16::from_f32(x.clamp(f16::MIN.to_f32(), f16::MAX.to_f32()))
}

/// Bytes of a channel's number.
fn index_bytes(dim: usize) -> usize {
    if dim > 256 { 2 } else { 1 }
}

impl KvQuant {
    fn n_outliers(&self, dim: usize) -> usize {
        let share = (self.outliers * dim as f64).round() as usize;
        share.max(usize::from(self.outliers > 0.0)).min(dim)
    }

    /// The outliers' channels, ascending.
    fn strangest(&self, row: &[f32]) -> Vec<usize> {
        let distance: Vec<f32> = match &self.channels {
            Some(Channels { middle, width }) => {
                let scales = middle.iter().zip(width);
                row.iter()
                    .zip(scales)
                    .map(|(x, (m, w))| ((x - m) / w).abs())
                    .collect()
            }
            None => {
                let sum: f64 = row.iter().map(|&x| f64::from(x)).sum();
                let mean = (sum / row.len() as f64) as f32;
                row.iter().map(|x| (x - mean).abs()).collect()
            }
        };
        let n = self.n_outliers(row.len());
        let mut order: Vec<usize> = (0..row.len()).collect();
        if n > 0 {
            order.select_nth_unstable_by(n - 1, |&a, &b| {
                distance[b].total_cmp(&distance[a]).then(a.cmp(&b))
            });
        }
        order.truncate(n);
        order.sort_unstable();
        order
    }

    /// The row in half widths around its middles, and a value's middle and half width.
    fn normalised(&self, row: &[f32], outliers: &[usize]) -> (Vec<f32>, f16, f16) {
        if let Some(Channels { middle, width }) = &self.channels {
            let scales = middle.iter().zip(width);
            let normalised = row.iter().zip(scales).map(|(x, (m, w))| (x - m) / w);
            return (normalised.collect(), f16::ZERO, f16::ZERO);
        }
        let (middle, width) = middle_and_width(row, outliers);
        let (m, w) = (middle.to_f32(), width.to_f32());
        let normalised = row.iter().map(|x| if w > 0.0 { (x - m) / w } else { 0.0 });
        (normalised.collect(), middle, width)
    }

    /// Splits a row's bytes into codes, half width and middle, outliers' channels, outliers.
    fn parts(&self, dim: usize) -> [usize; 3] {
        let codes = stream_bytes(dim, self.levels.bits);
        let scales = codes + self.scale_bytes(dim);
        [
            codes,
            scales,
            scales + self.n_outliers(dim) * index_bytes(dim),
        ]
    }
}

impl RowCodec for KvQuant {
    fn row_bytes(&self, dim: usize) -> usize {
        let [.., values] = self.parts(dim);
        values + 2 * self.n_outliers(dim)
    }

    fn scale_bytes(&self, _dim: usize) -> usize {
        if self.channels.is_some() { 0 } else { 4 }
    }

    fn encode(&self, row: &[f32], out: &mut [u8]) {
        let outliers = self.strangest(row);
        let (normalised, middle, width) = self.normalised(row, &outliers);
        let [codes, scales, indices] = self.parts(row.len());
        nearest(&self.levels, &normalised, &mut out[..codes]);
        if self.channels.is_none() {
            out[codes..codes + 2].copy_from_slice(&width.to_le_bytes());
            out[codes + 2..scales].copy_from_slice(&middle.to_le_bytes());
        }
        let (channels, values) = out[scales..].split_at_mut(indices - scales);
        let channels = channels.chunks_exact_mut(index_bytes(row.len()));
        for ((&i, channel), value) in outliers.iter().zip(channels).zip(values.as_chunks_mut().0) {
            channel.copy_from_slice(&i.to_le_bytes()[..channel.len()]);
            *value = to_f16(row[i]).to_le_bytes();
        }
    }

    fn decode(&self, bytes: &[u8], row: &mut [f32]) {
        let dim = row.len();
        let [codes, scales, indices] = self.parts(dim);
        look_up(&self.levels, &bytes[..codes], 1.0, row);
        if let Some(Channels { middle, width }) = &self.channels {
            for ((x, m), w) in row.iter_mut().zip(middle).zip(width) {
                *x = *x * w + m;
            }
        } else {
            let (pair, _) = bytes[codes..scales].as_chunks();
            let [w, m] = [pair[0], pair[1]].map(|b| f16::from_le_bytes(b).to_f32());
            for x in row.iter_mut() {
                *x = *x * w + m;
            }
        }
        let channels = bytes[scales..indices].chunks_exact(index_bytes(dim));
        for (channel, value) in channels.zip(bytes[indices..].as_chunks().0) {
            let i = channel
                .iter()
                .rev()
                .fold(0, |i, &b| i << 8 | usize::from(b));
            row[i] = f16::from_le_bytes(*value).to_f32();
        }
    }

    fn table_bytes(&self) -> u64 {
        let channels = self.channels.as_ref();
        self.levels.table_bytes() + channels.map_or(0, |c| 8 * c.middle.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::encode::STAGES;
    use crate::cache::encode::fixture::{build_on, normals};
    use crate::cache::stage::Value;

    fn codec(
        side: Side,
        bits: i64,
        outliers: f64,
        samples: &[Vec<f32>],
        dim: usize,
    ) -> Arc<dyn RowCodec> {
        let def = STAGES.iter().find(|d| d.name == "kvquant").unwrap();
        let mut params = Params::default();
        params.0.insert("bits".into(), Value::Int(bits));
        params.0.insert("outliers".into(), Value::Float(outliers));
        match build_on(side, def, &params, (dim, samples)) {
            Ok(Codec::Rows(codec)) => codec,
            _ => panic!("kvquant codes rows"),
        }
    }

    fn trip(codec: &dyn RowCodec, row: &[f32]) -> (Vec<u8>, Vec<f32>) {
        let mut bytes = vec![0xee; codec.row_bytes(row.len())];
        codec.encode(row, &mut bytes);
        let mut back = vec![f32::NAN; row.len()];
        codec.decode(&bytes, &mut back);
        (bytes, back)
    }

    /// Keys with an offset and a size per channel.
    fn keys(n: usize, dim: usize, seed: u64) -> Vec<f32> {
        let mut rows = normals(n * dim, seed);
        for (i, x) in rows.iter_mut().enumerate() {
            let c = i % dim;
            *x = (c as f32 - 8.0) + *x * (0.1 + c as f32 / 8.0);
        }
        rows
    }

    #[test]
    fn the_outliers_are_the_k_farthest_and_come_back() {
        for (side, share, n) in [
            (Side::V, 0.01, 1),
            (Side::V, 0.05, 3),
            (Side::K, 0.1, 6),
            (Side::K, 0.0, 0),
        ] {
            let samples = [normals(300 * 64, 1)];
            let codec = codec(side, 3, share, &samples, 64);
            let mut row = normals(64, 2);
            for (i, x) in [(60, 30.0), (3, -20.0), (17, 25.0)] {
                row[i] = x;
            }
            let (_, back) = trip(&*codec, &row);
            let exact: Vec<usize> = (0..64)
                .filter(|&i| back[i] == f16::from_f32(row[i]).to_f32())
                .collect();
            assert_eq!(exact.len(), n, "{side:?} {share}");
            for i in [60, 17, 3].iter().take(n) {
                assert!(exact.contains(i), "{side:?} {share}: {i}");
            }
            let scales = if side == Side::V { 4 } else { 0 };
            assert_eq!(codec.scale_bytes(64), scales);
            assert_eq!(codec.row_bytes(64), 24 + scales + 3 * n);
        }
    }

    #[test]
    fn of_equally_far_channels_the_first_are_kept_and_wide_rows_have_two_byte_indices() {
        let samples = [normals(50 * 300, 1)];
        let codec = codec(Side::V, 2, 0.01, &samples, 300);
        let mut row = vec![0.0; 300];
        for i in [299, 270, 5, 120] {
            row[i] = if i % 2 == 0 { 1.0 } else { -1.0 };
        }
        let (bytes, back) = trip(&*codec, &row);
        let (codes, scales) = (75, 4);
        let indices = bytes[codes + scales..][..6].as_chunks().0.iter();
        let indices: Vec<u16> = indices.map(|b| u16::from_le_bytes(*b)).collect();
        assert_eq!(indices, [5, 120, 270]);
        assert_eq!((back[5], back[120], back[270]), (-1.0, 1.0, 1.0));
    }

    #[test]
    fn keys_are_normalised_by_their_channels_and_values_by_their_rows() {
        let dim = 16;
        let samples = [keys(500, dim, 3)];
        let rows = keys(200, dim, 4);
        let codec_of = |side| codec(side, 4, 0.01, &samples, dim);
        let (k, v) = (codec_of(Side::K), codec_of(Side::V));
        let mut square = [0.0f64; 16];
        for row in rows.chunks(dim) {
            let (_, back) = trip(&*k, row);
            for (s, (x, y)) in square.iter_mut().zip(row.iter().zip(back)) {
                *s += f64::from(x - y).powi(2) / 200.0;
            }
            // A value's row may have any size; a key's channels have that of the calibration.
            let wide: Vec<f32> = row.iter().map(|x| 64.0 * x).collect();
            let grown = |codec: &dyn RowCodec| -> Vec<f32> {
                trip(codec, row).1.iter().map(|x| 64.0 * x).collect()
            };
            assert_eq!(trip(&*v, &wide).1, grown(&*v));
            assert_ne!(trip(&*k, &wide).1, grown(&*k));
        }
        // A key's error follows its channel's size, about a tenth of it.
        for (c, square) in square.iter().enumerate() {
            let error = square.sqrt() / (0.1 + c as f64 / 8.0);
            assert!((0.03..0.16).contains(&error), "channel {c}: {error}");
        }
    }

    #[test]
    fn fitted_levels_beat_an_even_grid() {
        let samples = [normals(400 * 64, 5)];
        let codec = codec(Side::K, 2, 0.0, &samples, 64);
        let row = normals(64 * 64, 6);
        let square = |back: &[f32]| -> f64 {
            row.iter()
                .zip(back)
                .map(|(x, y)| f64::from(x - y).powi(2))
                .sum::<f64>()
                / row.len() as f64
        };
        let back: Vec<f32> = row.chunks(64).flat_map(|r| trip(&*codec, r).1).collect();
        // Four levels for a normal number: 0.1175 at best (Max, 1960), channels' widths differ a little.
        assert!((0.115..0.13).contains(&square(&back)), "{}", square(&back));
        assert_eq!(codec.table_bytes(), 16 + 8 * 64);
    }

    #[test]
    fn rows_of_one_value_and_channels_that_never_move_are_no_trouble() {
        let samples = [[vec![1.5; 20], vec![1.5; 20]].concat()];
        for side in [Side::K, Side::V] {
            let codec = codec(side, 4, 0.01, &samples, 20);
            assert_eq!(trip(&*codec, &[1.5; 20]).1, [1.5; 20], "{side:?}");
            assert!(trip(&*codec, &[-7e4; 20]).1.iter().all(|x| x.is_finite()));
        }
    }

    #[test]
    fn without_calibration_or_with_a_bad_one_it_is_refused() {
        let def = STAGES.iter().find(|d| d.name == "kvquant").unwrap();
        let refusal = |dim, samples: &[Vec<f32>]| match build_on(
            Side::K,
            def,
            &Params::default(),
            (dim, samples),
        ) {
            Ok(_) => panic!("it was built"),
            Err(e) => e.to_string(),
        };
        for none in [&[][..], &[vec![]]] {
            assert!(refusal(8, none).contains("needs calibration"));
        }
        assert!(refusal(8, &[vec![0.0; 12]]).contains("not of 8 channels"));
        assert!(refusal(8, &[vec![f32::NAN; 16]]).contains("not finite"));
    }
}

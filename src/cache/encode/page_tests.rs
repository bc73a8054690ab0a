//! What every codec that codes pages must do, at every number of rows and at widths of all kinds.

use crate::cache::RANGE;
use crate::cache::encode::STAGES;
use crate::cache::encode::fixture::{normals, page_codecs, relative_error};
use crate::cache::stage::{PageCodec, Tolerance};

const DIMS: [usize; 5] = [20, 33, 64, 80, 256];

fn encoded(codec: &dyn PageCodec, rows: &[f32], dim: usize, filler: u8) -> Vec<u8> {
    let mut bytes = vec![filler; codec.page_bytes(rows.len() / dim, dim)];
    codec.encode(rows, dim, &mut bytes);
    bytes
}

fn decoded(codec: &dyn PageCodec, bytes: &[u8], dim: usize, n: usize) -> Vec<f32> {
    let mut rows = vec![f32::NAN; n * dim];
    codec.decode(bytes, dim, &mut rows);
    rows
}

#[test]
fn random_pages_stay_within_the_tolerance_and_lossy_formats_lose_something() {
    for def in STAGES {
        let Tolerance::RelativeL2(bound) = def.tolerance else {
            continue;
        };
        for (i, dim) in DIMS.into_iter().enumerate() {
            for (example, codec) in page_codecs(def, dim) {
                let n = codec.page_rows();
                assert_eq!(RANGE % n, 0, "{example}: pages of {n} rows");
                let rows = normals(n * dim, i as u64);
                let back = decoded(&*codec, &encoded(&*codec, &rows, dim, 0), dim, n);
                let error = relative_error(&rows, &back);
                assert!(
                    error < f64::from(bound),
                    "{example} at {dim}: {error} ≥ {bound}"
                );
                assert!(error > 0.0, "{example} at {dim}: no error");
            }
        }
    }
}

#[test]
fn short_pages_of_any_length_come_back_and_never_take_more_bytes_than_a_longer_one() {
    for def in STAGES {
        for dim in [20, 33] {
            for (example, codec) in page_codecs(def, dim) {
                let rows = normals(codec.page_rows() * dim, 5);
                let mut last = 0;
                for n in 1..=codec.page_rows() {
                    let rows = &rows[..n * dim];
                    let bytes = encoded(&*codec, rows, dim, 0xa5);
                    assert!(bytes.len() > last, "{example} {n}");
                    assert!(codec.scale_bytes(n, dim) < bytes.len(), "{example} {n}");
                    last = bytes.len();
                    assert_eq!(bytes, encoded(&*codec, rows, dim, 0x5a), "{example} {n}");
                    let back = decoded(&*codec, &bytes, dim, n);
                    assert!(relative_error(rows, &back) < 1.0, "{example} {n}");
                }
            }
        }
    }
}

#[test]
fn decoded_pages_are_finite_and_keep_their_order_of_magnitude() {
    for def in STAGES {
        for (example, codec) in page_codecs(def, 20) {
            for exponent in -20..10 {
                let n = codec.page_rows();
                let scale = 2f32.powi(exponent);
                let rows: Vec<f32> = normals(n * 20, 6).iter().map(|x| x * scale).collect();
                let amax = rows.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                let back = decoded(&*codec, &encoded(&*codec, &rows, 20, 0), 20, n);
                for y in back {
                    assert!(y.abs() <= amax * 1.2 + 1e-3, "{example}: {y} of {amax}");
                }
            }
        }
    }
}

//! The row codecs against bytes that other people's code wrote: ggml's library (its block formats), gguf-py (f16, bf16),
//! torch (FP8), NVIDIA's Model Optimizer (NVFP4, scales, biases) and torchao (MXFP4). Every comparison is to the bit.

use std::sync::Arc;

use kvlab::cache::Geometry;
use kvlab::cache::stage::{
    BuildContext, Codec, HeadContext, KeyForm, Kind, Params, RowCodec, Side, Stage, StageError,
    Value, find,
};
use safetensors::SafeTensors;

const CODECS: &[u8] = include_bytes!("golden/codecs.safetensors");
const GGML: &[u8] = include_bytes!("golden/ggml.safetensors");
const SCALED: &[u8] = include_bytes!("golden/scaled.safetensors");
const GGUF: &[u8] = include_bytes!("golden/dequant.safetensors");

/// Parameters by name.
type Given<'a> = &'a [(&'a str, &'a str)];

/// The codec of KV head 1 with calibration rows `[kv_head][token · 64]`.
fn built(
    name: &str,
    params: Given<'_>,
    samples: &[Vec<f32>],
) -> Result<Arc<dyn RowCodec>, StageError> {
    let context = BuildContext {
        geometry: &Geometry { layers: Vec::new() },
        keys: KeyForm::PostRope,
        side: Side::K,
        calibration: None,
        backing_dir: None,
        head: Some(HeadContext {
            kv_head: 1,
            samples,
            ..HeadContext::any(64)
        }),
    };
    let def = find(Kind::Encode, name).unwrap();
    let given = params
        .iter()
        .map(|&(k, v)| (k.to_owned(), Value::Text(v.to_owned())));
    let params = Params::resolve(def, &Params(given.collect())).unwrap();
    match (def.build)(&params, &context)? {
        Stage::Encode(Codec::Rows(codec)) => Ok(codec),
        _ => panic!("{name} is not a codec"),
    }
}

fn codec(name: &str) -> Arc<dyn RowCodec> {
    built(name, &[], &[]).unwrap()
}

/// A tensor's bytes and the length of its last axis.
fn tensor(file: &'static [u8], name: &str) -> (Vec<u8>, usize) {
    let file = SafeTensors::deserialize(file).unwrap();
    let view = file.tensor(name).unwrap();
    (view.data().to_vec(), *view.shape().last().unwrap())
}

fn floats(file: &'static [u8], name: &str) -> (Vec<f32>, usize) {
    let (bytes, width) = tensor(file, name);
    let values = bytes
        .as_chunks()
        .0
        .iter()
        .map(|b| f32::from_le_bytes(*b))
        .collect();
    (values, width)
}

fn encoded(codec: &dyn RowCodec, row: &[f32]) -> Vec<u8> {
    let mut out = vec![0xee; codec.row_bytes(row.len())];
    codec.encode(row, &mut out);
    out
}

/// Every row of `x` gives the bytes of `bytes`.
fn assert_written(name: &str, file: &'static [u8], x: &str, bytes: &str) {
    assert_written_by(&*codec(name), file, x, bytes);
}

fn assert_written_by(codec: &dyn RowCodec, file: &'static [u8], x: &str, bytes: &str) {
    let (x, dim) = floats(file, x);
    let (want, row_bytes) = tensor(file, bytes);
    assert_eq!(codec.row_bytes(dim), row_bytes);
    assert_eq!(x.len() / dim, want.len() / row_bytes);
    for (i, (row, want)) in x.chunks(dim).zip(want.chunks(row_bytes)).enumerate() {
        assert_eq!(encoded(codec, row), want, "{bytes}, row {i}");
    }
}

/// Every row of `bytes` decodes to the values of `values`; a NaN to a NaN.
fn assert_read(name: &str, file: &'static [u8], bytes: &str, values: &str) {
    assert_read_by(&*codec(name), file, bytes, values);
}

fn assert_read_by(codec: &dyn RowCodec, file: &'static [u8], bytes: &str, values: &str) {
    let (bytes, _) = tensor(file, bytes);
    let (want, dim) = floats(file, values);
    let mut rows = vec![f32::NAN; want.len()];
    codec.decode_rows(&bytes, dim, &mut rows);
    for (i, (got, want)) in rows.iter().zip(&want).enumerate() {
        // The sign of a zero is no part of a number's value: ggml reads E2M1's −0 as 0.
        let same = got == want || got.is_nan() && want.is_nan();
        assert!(same, "{values}, value {i}: {got} {want}");
    }
}

#[test]
fn ggml_blocks_are_written_byte_for_byte_and_read_bit_for_bit() {
    for name in ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"] {
        let (bytes, values) = (format!("{name}.bytes"), format!("{name}.values"));
        assert_written(name, GGML, "x", &bytes);
        assert_read(name, GGML, &bytes, &values);
    }
}

#[test]
fn gguf_py_s_blocks_are_read_bit_for_bit() {
    for name in ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "f16", "bf16"] {
        let key = name.to_uppercase();
        assert_read(
            name,
            GGUF,
            &format!("{key}.blocks"),
            &format!("{key}.values"),
        );
    }
}

#[test]
fn mxfp4_is_torchao_s_codes_and_scales_and_ggml_s_values() {
    assert_written("mxfp4", CODECS, "mxfp4.x", "mxfp4.bytes");
    assert_read("mxfp4", GGML, "mxfp4.bytes", "mxfp4.values");
}

#[test]
fn fp8_is_torch_s_cast_of_clamped_values() {
    for name in ["fp8_e4m3", "fp8_e5m2"] {
        let codec = codec(name);
        let (x, _) = floats(CODECS, &format!("{name}.x"));
        let (want, _) = tensor(CODECS, &format!("{name}.bytes"));
        for ((x, got), want) in x.iter().zip(encoded(&*codec, &x)).zip(want) {
            assert_eq!(got, want, "{name} of {x}");
        }
        let (table, _) = floats(CODECS, &format!("{name}.table"));
        let bytes: Vec<u8> = (0..=255).collect();
        let mut values = [0.0; 256];
        codec.decode(&bytes, &mut values);
        for ((byte, got), want) in bytes.iter().zip(values).zip(table) {
            let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
            assert!(same, "{name}, {byte:#x}: {got} {want}");
        }
    }
}

#[test]
fn nvfp4_is_modelopt_s_codes_scales_and_values() {
    let codec = codec("nvfp4");
    let (x, dim) = floats(CODECS, "nvfp4.x");
    let (codes, code_bytes) = tensor(CODECS, "nvfp4.codes");
    let (scales, scale_bytes) = tensor(CODECS, "nvfp4.scales");
    let (values, _) = floats(CODECS, "nvfp4.values");
    assert_eq!(floats(CODECS, "nvfp4.s2").0, [448.0 / 2688.0]);
    for (i, row) in x.chunks(dim).enumerate() {
        let bytes = encoded(&*codec, row);
        let (got_codes, got_scales) = bytes.split_at(code_bytes);
        assert_eq!(
            got_scales,
            &scales[i * scale_bytes..][..scale_bytes],
            "scales of row {i}"
        );
        assert_eq!(
            got_codes,
            &codes[i * code_bytes..][..code_bytes],
            "codes of row {i}"
        );
        let mut back = vec![f32::NAN; dim];
        codec.decode(&bytes, &mut back);
        // modelopt reads code 8 as +0.0, this codec as −0.0: equal as numbers.
        assert_eq!(back, values[i * dim..][..dim], "values of row {i}");
    }
}

fn calibration_rows() -> Vec<Vec<f32>> {
    let (rows, _) = floats(SCALED, "samples");
    rows.chunks(8 * 64).map(<[f32]>::to_vec).collect()
}

#[test]
fn scaled_fp8_is_modelopt_s() {
    for name in ["fp8_e4m3", "fp8_e5m2"] {
        for scale in ["tensor", "head"] {
            let codec = built(name, &[("scale", scale)], &calibration_rows()).unwrap();
            let (bytes, values) = (
                format!("{name}.{scale}.bytes"),
                format!("{name}.{scale}.values"),
            );
            assert_written_by(&*codec, SCALED, "x", &bytes);
            assert_read_by(&*codec, SCALED, &bytes, &values);
            assert_eq!(codec.scale_bytes(64), 0);
            // Head 0 is charged for the scale of a layer's side.
            assert_eq!(codec.table_bytes(), if scale == "head" { 4 } else { 0 });
        }
    }
}

#[test]
fn a_scale_per_token_stands_before_the_codes() {
    for name in ["fp8_e4m3", "fp8_e5m2"] {
        let codec = built(name, &[("scale", "token")], &[]).unwrap();
        let (x, dim) = floats(SCALED, "x");
        let (scales, _) = floats(SCALED, &format!("{name}.token.scales"));
        let (codes, _) = tensor(SCALED, &format!("{name}.token.bytes"));
        let (values, _) = floats(SCALED, &format!("{name}.token.values"));
        assert_eq!((codec.row_bytes(64), codec.scale_bytes(64)), (68, 4));
        for (i, row) in x.chunks(dim).enumerate() {
            let bytes = encoded(&*codec, row);
            assert_eq!(bytes[..4], scales[i].to_le_bytes(), "{name}, row {i}");
            assert_eq!(bytes[4..], codes[i * dim..][..dim], "{name}, row {i}");
            let mut back = vec![f32::NAN; dim];
            codec.decode_rows(&bytes, dim, &mut back);
            assert_eq!(back, values[i * dim..][..dim], "{name}, row {i}");
        }
    }
}

#[test]
fn nvfp4_s_variants_are_modelopt_s() {
    let mean = ("affine", "mean");
    let calibrated = ("amax", "calibrated");
    let four_over_six = ("blocks", "four_over_six");
    let cases: [(&str, Given<'_>, u64); 5] = [
        ("calibrated", &[calibrated], 0),
        ("mean", &[calibrated, mean], 256),
        ("max_min", &[("affine", "max_min")], 256),
        ("four_over_six", &[four_over_six], 0),
        ("all", &[calibrated, mean, four_over_six], 256),
    ];
    for (name, params, table_bytes) in cases {
        let codec = built("nvfp4", params, &calibration_rows()).unwrap();
        let (bytes, values) = (
            format!("nvfp4.{name}.bytes"),
            format!("nvfp4.{name}.values"),
        );
        assert_written_by(&*codec, SCALED, "x", &bytes);
        assert_read_by(&*codec, SCALED, &bytes, &values);
        assert_eq!(codec.table_bytes(), table_bytes, "{name}");
    }
}

#[test]
fn a_scale_that_has_to_be_learnt_is_never_assumed() {
    let cases = [
        ("fp8_e4m3", ("scale", "tensor")),
        ("fp8_e4m3", ("scale", "head")),
        ("fp8_e5m2", ("scale", "tensor")),
        ("fp8_e5m2", ("scale", "head")),
        ("nvfp4", ("amax", "calibrated")),
        ("nvfp4", ("affine", "mean")),
        ("nvfp4", ("affine", "max_min")),
    ];
    for (name, param) in cases {
        let def = find(Kind::Encode, name).unwrap();
        let (key, word) = param;
        let params = Params([(key.to_owned(), Value::Text(word.to_owned()))].into());
        assert!((def.calibrated)(&params), "{name} {param:?}");
        for samples in [vec![], vec![vec![]; 2]] {
            assert!(
                matches!(
                    built(name, &[param], &samples),
                    Err(StageError::NoCalibration { .. })
                ),
                "{name} {param:?}"
            );
        }
        assert!(!(def.calibrated)(&Params::default()), "{name}");
    }
    let zeros = vec![vec![0.0; 128]; 2];
    for (name, param) in [
        ("fp8_e4m3", ("scale", "head")),
        ("nvfp4", ("amax", "calibrated")),
    ] {
        let message = built(name, &[param], &zeros).err().unwrap().to_string();
        assert!(message.contains("above 0"), "{message}");
    }
}

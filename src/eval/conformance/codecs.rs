//! Codecs, packers and tiers: bytes alone carry a row, a lossless stage gives back the input's bits, a lossy one errs, within
//! its stated bound.

use std::sync::Arc;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::Context;
use super::failure::{Scene, Stop, Verdict};
use super::fixture::{Source, calibration, codec_rows, geometry, script};
use super::rig::Rig;
use crate::cache::pages::HostStore;
use crate::cache::stage::{
    BuildContext, Calibration, Codec, HeadContext, KeyForm, Kind, Packer, Params, Side, Stage,
    StageError, Tolerance, find,
};
use crate::cache::strategy::StageSpec;
use crate::cache::{Geometry, SeqId};

/// Head sizes with whole and partial blocks.
const HEAD_DIMS: [usize; 7] = [20, 32, 33, 64, 80, 128, 256];

/// Rows, or pages, of each size.
const N_TRIES: usize = 16;

/// Every codec of the strategy by its own promise; packing and placing change nothing.
pub fn exactness(c: &Context<'_>) -> Verdict {
    let strategy = c.rig.subject.strategy();
    let mut refused = Vec::new();
    let learned = HEAD_DIMS.map(Learned::new);
    for (k, v) in strategy.levels() {
        for (side, spec) in Side::BOTH.into_iter().zip([k, v]) {
            let tolerance = c.rig.subject.tolerance(spec);
            let promise = tolerance.map_err(|e| {
                let scene = c.rig.scene("the codec's definition", "none");
                scene.failed(e, "a registered codec")
            })?;
            for learned in &learned {
                let head_dim = learned.head_dim;
                let fresh = || c.rig.subject.codec(spec, side, learned);
                if let Err(e) = fresh() {
                    refused.push(format!("`{}` on head_dim {head_dim}: {e}", spec.name));
                    continue;
                }
                hold(&c.rig, (spec, head_dim), promise, &fresh)?;
            }
        }
    }
    unpacked(&c.rig)?;
    Ok((!refused.is_empty()).then(|| format!("refused: {}", refused.join("; "))))
}

/// What codecs of one head size may learn from.
#[derive(Debug)]
pub struct Learned {
    /// Channels of a row.
    pub head_dim: usize,
    geometry: Geometry,
    calibration: Calibration,
    samples: Vec<Vec<f32>>,
}

impl Learned {
    /// Random rows, and moments of rows of 32 channels: codecs learn from rows alone.
    fn new(head_dim: usize) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(head_dim as u64);
        let mut samples = || codec_rows(&mut rng, 128 * head_dim);
        let geometry = geometry(4, 2, head_dim);
        Self {
            head_dim,
            calibration: calibration(&super::fixture::geometry(4, 2, 32)),
            samples: geometry.layers.iter().map(|_| samples()).collect(),
            geometry,
        }
    }
}

/// A registered codec, built alone.
///
/// # Errors
/// What the stage refuses.
pub fn registered_codec(
    spec: &StageSpec,
    side: Side,
    learned: &Learned,
) -> Result<Codec, StageError> {
    let context = BuildContext {
        geometry: &learned.geometry,
        keys: KeyForm::default(),
        side,
        calibration: Some(&learned.calibration),
        backing_dir: None,
        head: Some(HeadContext {
            samples: &learned.samples,
            ..HeadContext::any(learned.head_dim)
        }),
    };
    let def = find(Kind::Encode, &spec.name)?;
    let parameter = |problem: String| StageError::Parameter {
        kind: Kind::Encode,
        name: spec.name.clone(),
        problem,
    };
    let params = Params::resolve(def, &spec.params).map_err(|problems| {
        let problems: Vec<String> = problems.into_iter().map(|(_, m)| m).collect();
        parameter(problems.join("; "))
    })?;
    match (def.build)(&params, &context)? {
        Stage::Encode(codec) => Ok(codec),
        _ => Err(parameter("does not build a codec".to_owned())),
    }
}

type Fresh<'a> = &'a dyn Fn() -> Result<Codec, StageError>;

fn hold(
    rig: &Rig<'_>,
    (spec, dim): (&StageSpec, usize),
    promise: Tolerance,
    fresh: Fresh<'_>,
) -> Result<(), Stop> {
    let layers = geometry(4, 2, dim);
    let (what, mut tokens) = (format!("`{}` alone", spec.name), String::new());
    let mut rng = ChaCha8Rng::seed_from_u64(rig.seed ^ 0xc0dec);
    for i in 0..N_TRIES {
        tokens.clear();
        tokens += &format!("row or page {i} of random numbers");
        let scene = Scene {
            what: &what,
            geometry: &layers,
            tokens: &tokens,
            first: 0,
        };
        let codec = || fresh().map_err(|e| scene.failed(e, "a codec, as at first"));
        let encoder = codec()?;
        let rows = codec_rows(&mut rng, encoder.page_rows() * dim);
        let bytes = encoded(&encoder, &rows, dim);
        // Whoever decodes has seen nothing but the bytes.
        drop(encoder);
        let back = decoded(&codec()?, &bytes, dim, rows.len());
        let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|v| v * v).sum::<f32>().sqrt();
        let difference = norm(&mut rows.iter().zip(&back).map(|(a, b)| a - b));
        let error = difference / norm(&mut rows.iter().copied());
        let expected = match promise {
            Tolerance::Exact if error != 0.0 => {
                "the input's bits: the stage says it is exact".into()
            }
            Tolerance::RelativeL2(_) if error == 0.0 => {
                "some error: a format of fewer bits cannot give random rows back".into()
            }
            Tolerance::RelativeL2(bound) if error.is_nan() || error > bound => {
                format!("at most {bound}, the stage's own bound, from the bytes alone")
            }
            _ => continue,
        };
        return Err(scene.failed(format!("‖x − x̂‖/‖x‖ = {error}"), expected));
    }
    Ok(())
}

fn encoded(codec: &Codec, rows: &[f32], dim: usize) -> Vec<u8> {
    let mut bytes = vec![0; codec.bytes(codec.page_rows(), dim)];
    match codec {
        Codec::Rows(codec) => codec.encode(rows, &mut bytes),
        Codec::Pages(codec) => codec.encode(rows, dim, &mut bytes),
    }
    bytes
}

fn decoded(codec: &Codec, bytes: &[u8], dim: usize, n: usize) -> Vec<f32> {
    let mut rows = vec![f32::NAN; n];
    match codec {
        Codec::Rows(codec) => codec.decode(bytes, &mut rows),
        Codec::Pages(codec) => codec.decode(bytes, dim, &mut rows),
    }
    rows
}

/// A packer gives back the bytes, and a strategy without packer and tier gives the same outputs.
fn unpacked(rig: &Rig<'_>) -> Result<(), Stop> {
    let rows = rig.script(300, 51);
    let s = rig.stages.as_ref();
    if let Some(packer) = &s.pack {
        packed_bytes(rig, packer.as_ref())?;
    }
    if s.pack.is_none() && s.place.is_none() {
        return Ok(());
    }
    let (_, got) = rig.fresh_run(&rows, &[60])?;
    let mut plain = s.clone();
    (plain.pack, plain.place) = (None, None);
    let mut cache = rig.cache_over(Arc::new(plain), Box::new(HostStore::default()))?;
    let want = rig.run(cache.as_mut(), SeqId(0), &rows, &[60])?;
    rig.scene(
        "packed or parked pages against plain ones",
        "300 tokens in chunks of [60]",
    )
    .same_bits(&got, &want)
}

fn packed_bytes(rig: &Rig<'_>, packer: &dyn Packer) -> Result<(), Stop> {
    let source = Source {
        seed: rig.seed,
        stream: 52,
    };
    let rows = script(&rig.geometry, 128, source, 0.5);
    let floats: &[u8] = bytemuck::cast_slice(&rows.k[0]);
    let (zeros, one) = (vec![0u8; 4096], vec![7u8; 1]);
    for (name, raw, row_bytes) in [
        ("128 rows of f32", floats, 128),
        ("zeros", &zeros, 32),
        ("one byte", &one, 1),
    ] {
        let scene = rig.scene("bytes packed and unpacked", name);
        let packed = packer.pack(raw, row_bytes).map_err(|e| scene.refused(&e))?;
        let mut back = vec![0xa5; raw.len()];
        let unpacked = packer.unpack(&packed, row_bytes, &mut back);
        unpacked.map_err(|e| scene.refused(&e))?;
        if let Some(i) = (0..raw.len()).find(|&i| raw[i] != back[i]) {
            let got = format!("byte {i} = {}", back[i]);
            return Err(scene.failed(got, format!("{}", raw[i])));
        }
    }
    Ok(())
}

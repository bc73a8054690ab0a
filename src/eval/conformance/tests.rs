//! Faults put into a strategy on purpose, each found by the check that is there for it.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::cache::stage::{LiveRows, NewRow, Retention, RowCodec};
use crate::cache::{Admission, Batch, Continuation, Materials, MemoryReport, Needs, Rows, SeqId};

/// What is wrong with a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// A value is replaced by that of the next token of its step.
    Peek,
    /// Values are scaled by the largest of their step.
    ChunkScale,
    /// Values are scaled by the largest of all sequences of the step, if there are several.
    BatchScale,
    /// Attends over another strategy's rows and reports those of the claimed one.
    Simulated,
    /// A fork is empty but for its length.
    EmptyFork,
    /// Truncation forgets what it was told.
    KeepsRows,
    /// Zeros take the place of what is not finite.
    SwallowsNan,
    /// Reports no bytes of codes.
    NoBytes,
    /// Pages stay behind a released sequence.
    Leaks,
}

struct Faulty {
    strategy: Strategy,
    fault: Fault,
    retain: Option<fn() -> Arc<dyn Retention>>,
    codec: Option<fn() -> Arc<dyn RowCodec>>,
    tolerance: Option<Tolerance>,
}

impl Faulty {
    fn of(format: &str) -> Self {
        Self {
            strategy: Strategy::bare(format),
            fault: Fault::None,
            retain: None,
            codec: None,
            tolerance: None,
        }
    }

    fn with(fault: Fault) -> Self {
        Self {
            fault,
            ..Self::of("q4_0")
        }
    }
}

impl Subject for Faulty {
    fn strategy(&self) -> &Strategy {
        &self.strategy
    }

    fn stages(&self, materials: Materials<'_>) -> Result<Stages, StageError> {
        let mut stages = Stages::build(&self.strategy, materials)?;
        stages.retain = self.retain.map(|new| new());
        if let Some(new) = self.codec {
            for formats in &mut stages.formats {
                formats.replace_codec(&Codec::Rows(new()));
            }
        }
        Ok(stages)
    }

    fn cache(
        &self,
        stages: Arc<Stages>,
        geometry: &Geometry,
        store: Box<dyn PageStore>,
    ) -> Result<Box<dyn KvCache>, CacheError> {
        let honest: Box<dyn KvCache> = Box::new(StagedCache::from_stages(stages, geometry, store)?);
        let materials = Materials {
            geometry,
            calibration: None,
            backing_dir: None,
        };
        let hidden: Option<Box<dyn KvCache>> = match self.fault {
            Fault::None => return Ok(honest),
            Fault::Simulated => Some(Box::new(StagedCache::new(
                &Strategy::bare("f16"),
                materials,
            )?)),
            _ => None,
        };
        Ok(Box::new(Broken {
            inner: honest,
            hidden,
            fault: self.fault,
        }))
    }

    fn tolerance(&self, spec: &StageSpec) -> Result<Tolerance, StageError> {
        Ok(self
            .tolerance
            .unwrap_or(find(Kind::Encode, &spec.name)?.tolerance))
    }

    fn codec(&self, spec: &StageSpec, side: Side, learned: &Learned) -> Result<Codec, StageError> {
        match self.codec {
            Some(new) => Ok(Codec::Rows(new())),
            None => registered_codec(spec, side, learned),
        }
    }
}

struct Broken {
    inner: Box<dyn KvCache>,
    hidden: Option<Box<dyn KvCache>>,
    fault: Fault,
}

impl Broken {
    /// V as the fault would have it.
    fn values(&self, batch: &Batch, v: &[f32]) -> Vec<f32> {
        let mut v = v.to_vec();
        let width = v.len() / batch.n_rows();
        let largest = |x: &[f32]| x.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        match self.fault {
            Fault::Peek => {
                for span in batch.spans() {
                    let rows = span.first_row * width..(span.first_row + span.n_tokens()) * width;
                    v.copy_within(rows.start + width.min(rows.len())..rows.end, rows.start);
                }
            }
            Fault::ChunkScale => {
                for span in batch.spans() {
                    let rows = span.first_row * width..(span.first_row + span.n_tokens()) * width;
                    let step = largest(&v[rows.clone()]) / 7.0;
                    v[rows]
                        .iter_mut()
                        .for_each(|x| *x = (*x / step).round() * step);
                }
            }
            Fault::BatchScale if batch.spans().len() > 1 => {
                let step = largest(&v) / 1e6;
                v.iter_mut().for_each(|x| *x = (*x / step).round() * step);
            }
            Fault::SwallowsNan => {
                v.iter_mut()
                    .filter(|x| !x.is_finite())
                    .for_each(|x| *x = 0.0);
            }
            _ => {}
        }
        v
    }
}

impl KvCache for Broken {
    fn needs(&self) -> Needs {
        self.inner.needs()
    }
    fn admit(&mut self, seq: SeqId, admission: Admission) -> Result<(), CacheError> {
        if let Some(hidden) = &mut self.hidden {
            hidden.admit(seq, admission)?;
        }
        self.inner.admit(seq, admission)
    }
    fn append(&mut self, layer: usize, batch: &Batch, rows: Rows<'_>) -> Result<(), CacheError> {
        if let Some(hidden) = &mut self.hidden {
            hidden.append(layer, batch, rows)?;
        }
        let v = self.values(batch, rows.v);
        self.inner.append(layer, batch, Rows { v: &v, ..rows })
    }
    fn attend(
        &mut self,
        layer: usize,
        batch: &Batch,
        q: &[f32],
        out: &mut [f32],
    ) -> Result<(), CacheError> {
        match &mut self.hidden {
            Some(hidden) => hidden.attend(layer, batch, q, out),
            None => self.inner.attend(layer, batch, q, out),
        }
    }
    fn commit(&mut self, batch: &Batch) -> Result<(), CacheError> {
        if let Some(hidden) = &mut self.hidden {
            hidden.commit(batch)?;
        }
        self.inner.commit(batch)
    }
    fn compress(&mut self, seq: SeqId, continuation: Continuation) -> Result<(), CacheError> {
        self.inner.compress(seq, continuation)
    }
    fn fork(&mut self, from: SeqId, to: SeqId) -> Result<(), CacheError> {
        self.inner.fork(from, to)?;
        if self.fault == Fault::EmptyFork {
            self.inner.truncate(to, 0)?;
        }
        Ok(())
    }
    fn truncate(&mut self, seq: SeqId, len: u32) -> Result<(), CacheError> {
        match self.fault {
            Fault::KeepsRows => Ok(()),
            _ => self.inner.truncate(seq, len),
        }
    }
    fn release(&mut self, seq: SeqId) -> Result<(), CacheError> {
        match self.fault {
            Fault::Leaks => Ok(()),
            _ => self.inner.release(seq),
        }
    }
    fn len(&self, seq: SeqId) -> Result<u32, CacheError> {
        self.inner.len(seq)
    }
    fn memory(&self) -> MemoryReport {
        let report = self.inner.memory();
        match self.fault {
            Fault::NoBytes => MemoryReport {
                payload_bytes: 0,
                ..report
            },
            _ => report,
        }
    }
}

/// What a check says of a subject: the failure, or `None`.
fn failure(subject: &Faulty, check: &str) -> Option<Failure> {
    let context = Context::new(subject, 0).expect("builds");
    match find_check(check).expect("a check").run(&context) {
        Err(Stop::Failed(failure)) => Some(*failure),
        _ => None,
    }
}

#[test]
fn each_fault_of_a_cache_is_found_by_its_check() {
    for (fault, check) in [
        (Fault::Peek, "causality"),
        (Fault::Peek, "oracle"),
        (Fault::ChunkScale, "chunking"),
        (Fault::ChunkScale, "shapes"),
        (Fault::BatchScale, "batching"),
        (Fault::Simulated, "oracle"),
        (Fault::EmptyFork, "fork"),
        (Fault::KeepsRows, "truncate"),
        (Fault::SwallowsNan, "non-finite"),
        (Fault::NoBytes, "bytes"),
        (Fault::Leaks, "bytes"),
    ] {
        let found = failure(&Faulty::with(fault), check);
        assert!(found.is_some(), "{fault:?} is not found by {check}");
        assert_eq!(failure(&Faulty::with(Fault::None), check), None, "{check}");
    }
}

#[test]
fn a_failure_names_the_first_place_and_both_numbers() {
    let found = failure(&Faulty::with(Fault::Peek), "causality").expect("found");
    let place = found.place.expect("outputs were compared");
    // The row before the first changed one has taken the changed one's value.
    assert_eq!((place.layer, place.position), (0, 0));
    assert!(found.max_error.is_some_and(|e| e > 0.1));
    assert_ne!(found.got, found.expected);
    let told = found.to_string();
    assert!(
        told.contains("layer 0, head 0, position 0, channel 0"),
        "{told}"
    );
    assert!(
        told.contains("4 query heads, 2 KV heads, head_dim 32"),
        "{told}"
    );
}

/// 4 bits claimed; what the fault says beside them.
struct FourBits<const FAULT: usize> {
    kept: Mutex<Vec<f32>>,
}

/// Rows are kept in place of the bytes.
const CHEATS: usize = 0;
/// A row of zeros is divided by its largest magnitude.
const DIVIDES_BY_ZERO: usize = 1;
/// Rows that are decoded together lose the last channel of each.
const FAST_PATH: usize = 2;
/// One byte a channel is needed.
const SOUND: usize = 3;

impl<const FAULT: usize> FourBits<FAULT> {
    fn boxed() -> Arc<dyn RowCodec> {
        Arc::new(Self {
            kept: Mutex::default(),
        })
    }
}

impl<const FAULT: usize> RowCodec for FourBits<FAULT> {
    fn row_bytes(&self, dim: usize) -> usize {
        dim + 4
    }
    fn scale_bytes(&self, _: usize) -> usize {
        4
    }
    fn encode(&self, row: &[f32], out: &mut [u8]) {
        if FAULT == CHEATS {
            *self.kept.lock().expect("one thread") = row.iter().map(|x| x * 1.001).collect();
            return;
        }
        let largest = row.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let unit = match FAULT {
            DIVIDES_BY_ZERO => largest / 7.0,
            _ => (largest / 7.0).max(f32::MIN_POSITIVE),
        };
        out[..4].copy_from_slice(&unit.to_le_bytes());
        for (x, b) in row.iter().zip(&mut out[4..]) {
            let code = x / unit;
            *b = if code.is_nan() {
                99
            } else {
                code.round() as i8 as u8
            };
        }
    }
    fn decode(&self, bytes: &[u8], row: &mut [f32]) {
        let kept = self.kept.lock().expect("one thread");
        if FAULT == CHEATS && kept.len() == row.len() {
            return row.copy_from_slice(&kept);
        }
        let unit = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        for (x, &b) in row.iter_mut().zip(&bytes[4..]) {
            *x = if b == 99 {
                f32::NAN
            } else {
                unit * f32::from(b as i8)
            };
        }
    }
    fn decode_rows(&self, bytes: &[u8], dim: usize, rows: &mut [f32]) {
        let n = self.row_bytes(dim);
        for (b, r) in bytes.chunks_exact(n).zip(rows.chunks_exact_mut(dim)) {
            self.decode(b, r);
            if FAULT == FAST_PATH {
                r[dim - 1] = 0.0;
            }
        }
    }
}

#[test]
fn each_fault_of_a_codec_is_found_by_its_check() {
    let with = |codec: fn() -> Arc<dyn RowCodec>| Faulty {
        codec: Some(codec),
        tolerance: Some(Tolerance::RelativeL2(0.2)),
        ..Faulty::of("q4_0")
    };
    for check in CHECKS.iter().map(|c| c.name) {
        let sound = failure(&with(FourBits::<SOUND>::boxed), check);
        assert_eq!(sound.map(|f| f.to_string()), None, "{check}");
    }
    for (codec, check) in [
        (
            FourBits::<CHEATS>::boxed as fn() -> Arc<dyn RowCodec>,
            "exactness",
        ),
        (FourBits::<CHEATS>::boxed, "oracle"),
        (FourBits::<DIVIDES_BY_ZERO>::boxed, "ties"),
        (FourBits::<FAST_PATH>::boxed, "oracle"),
    ] {
        assert!(failure(&with(codec), check).is_some(), "{check}");
    }
}

#[test]
fn promises_of_exactness_are_held() {
    // A lossy format without any error, and a lossless one with some.
    for (format, tolerance) in [
        ("f32", Tolerance::RelativeL2(0.1)),
        ("f16", Tolerance::Exact),
        ("q4_0", Tolerance::RelativeL2(0.01)),
    ] {
        let subject = Faulty {
            tolerance: Some(tolerance),
            ..Faulty::of(format)
        };
        let found = failure(&subject, "exactness");
        assert!(found.is_some(), "{format} as {tolerance:?}");
    }
}

/// Evicts what its own past says.
struct Moody(AtomicUsize);

impl Retention for Moody {
    fn score(&self, _: NewRow<'_>) -> f32 {
        0.0
    }
    fn evict(&self, live: LiveRows<'_>) -> Vec<usize> {
        let n = self.0.fetch_add(1, Ordering::Relaxed);
        if live.positions.len() > 20 {
            // A divisor that no run's number of calls has.
            vec![n % 19]
        } else {
            Vec::new()
        }
    }
}

/// Evicts everything.
struct Greedy;

impl Retention for Greedy {
    fn score(&self, _: NewRow<'_>) -> f32 {
        0.0
    }
    fn evict(&self, live: LiveRows<'_>) -> Vec<usize> {
        (0..live.positions.len()).collect()
    }
}

#[test]
fn each_fault_of_a_retention_is_found_by_its_check() {
    let with = |retain: fn() -> Arc<dyn Retention>| Faulty {
        retain: Some(retain),
        ..Faulty::of("f16")
    };
    let moody = || Arc::new(Moody(AtomicUsize::new(0))) as Arc<dyn Retention>;
    let greedy = || Arc::new(Greedy) as Arc<dyn Retention>;
    assert!(failure(&with(moody), "determinism").is_some());
    assert!(failure(&with(moody), "chunking").is_some());
    assert!(failure(&with(greedy), "short").is_some());
}

#[test]
fn row_budgets_are_cut_to_what_bites_and_say_so() {
    let mut strategy = Strategy::bare("f16");
    strategy.retain = Some(StageSpec::plain("window"));
    let params = &mut strategy.retain.as_mut().expect("set").params.0;
    params.insert("recent".into(), Value::Int(252));
    params.insert("sinks".into(), Value::Int(4));
    let (small, changes) = with_small_budgets(&strategy);
    assert_eq!(changes, ["recent = 24 in place of 252"]);
    assert_eq!(with_small_budgets(&small), (small.clone(), Vec::new()));
}

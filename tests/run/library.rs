//! The same through the library: batches, cells after each other, decoding against computing everything again.

use std::sync::{Arc, OnceLock};

use kvlab::cache::stage::{Params, Value};
use kvlab::cache::strategy::{StageSpec, Strategy};
use kvlab::cache::{Admission, Batch, Built, Geometry, KvCache, Materials, SeqId, StagedCache};
use kvlab::compute::cpu::Cpu;
use kvlab::data::{DataRef, Lookup};
use kvlab::engine::clock::SystemClock;
use kvlab::engine::prefill;
use kvlab::eval::lockstep::Lockstep;
use kvlab::model;
use kvlab::model::geometry::geometry;
use kvlab::model::transformer::{LanguageModel, Transformer};

use super::support::model_path;

struct Real {
    model: Transformer<Cpu>,
    geometry: Geometry,
    ids: Vec<u32>,
}

fn real() -> Option<&'static Real> {
    static REAL: OnceLock<Real> = OnceLock::new();
    let path = model_path()?;
    Some(REAL.get_or_init(|| {
        let loaded = model::load(path).expect("a sound model");
        let text = DataRef::named("quickstart-prose").expect("a text of the program");
        let text = text.load(&Lookup::default()).expect("it is in the program");
        Real {
            geometry: geometry(&loaded.spec, 512),
            ids: loaded.tokenizer.encode(&text.text).expect("tokens"),
            model: Transformer::load(Arc::from(loaded.weights)).expect("weights"),
        }
    }))
}

impl Real {
    fn cache(&self, strategy: &Strategy) -> StagedCache {
        let materials = Materials {
            geometry: &self.geometry,
            calibration: None,
            backing_dir: None,
        };
        StagedCache::new(strategy, materials).expect("a sound strategy")
    }

    /// Bits of the rows that a sequence gets when it is alone: a prefill of all but `n_decoded` tokens, then these.
    fn alone(&self, strategy: &Strategy, ids: &[u32], n_decoded: usize) -> Vec<u32> {
        let mut cache = self.cache(strategy);
        cache.admit(SeqId(9), Admission::Streaming).unwrap();
        let mut bits = Vec::new();
        let mut at = 0;
        for n in std::iter::once(ids.len() - n_decoded).chain(vec![1; n_decoded]) {
            let batch = Batch::single(SeqId(9), at as u32..(at + n) as u32);
            let hidden = self
                .model
                .step(&batch, &ids[at..at + n], &mut cache)
                .unwrap();
            bits.extend(hidden.rows.iter().map(|x| x.to_bits()));
            at += n;
        }
        bits
    }
}

#[test]
fn eight_ragged_sequences_equal_each_alone_to_the_bit() {
    let Some(real) = real() else { return };
    const LENGTHS: [usize; 8] = [1, 3, 17, 40, 2, 9, 33, 5];
    const DECODED: usize = 3;
    for strategy in ["f16", "nvfp4"].map(Strategy::bare) {
        let mut cache = real.cache(&strategy);
        // Sequence i reads its own stretch of the text.
        let text = |i: usize| &real.ids[i * 60..i * 60 + LENGTHS[i] + DECODED];
        let mut bits = vec![Vec::new(); LENGTHS.len()];
        for step in 0..=DECODED {
            let (mut batch, mut tokens, mut who) = (Batch::new(), Vec::new(), Vec::new());
            // One sequence leaves before the last step.
            for i in (0..LENGTHS.len()).filter(|&i| step < DECODED || i != 2) {
                let (seq, n) = (SeqId(i as u32), LENGTHS[i]);
                let range = if step == 0 {
                    0..n
                } else {
                    n + step - 1..n + step
                };
                if step == 0 {
                    cache.admit(seq, Admission::Streaming).unwrap();
                }
                who.extend(vec![i; range.len()]);
                tokens.extend(&text(i)[range.clone()]);
                batch.push(seq, range.start as u32..range.end as u32);
            }
            let hidden = real.model.step(&batch, &tokens, &mut cache).unwrap();
            for (i, row) in who.into_iter().zip(hidden.rows.chunks_exact(hidden.n_embd)) {
                bits[i].extend(row.iter().map(|x| x.to_bits()));
            }
            if step == DECODED - 1 {
                cache.release(SeqId(2)).unwrap();
            }
        }
        for (i, together) in bits.iter().enumerate() {
            let mut alone = real.alone(&strategy, text(i), DECODED);
            alone.truncate(together.len());
            assert!(*together == alone, "{}: sequence {i}", strategy.label);
        }
    }
}

#[test]
fn a_cell_leaves_nothing_behind_for_the_next_one() {
    let Some(real) = real() else { return };
    let clock = SystemClock::new();
    let lockstep = Lockstep {
        model: &real.model,
        geometry: &real.geometry,
        calibration: None,
        backing_dir: None,
        built: &Built::default(),
        chunk: 50,
        clock: &clock,
        repeat: None,
        latency_steps: 0,
        memory_every: 0,
        layer_queries: 0,
    };
    let a = Strategy::bare("nvfp4");
    let b = Strategy {
        retain: Some(StageSpec {
            name: "window".into(),
            params: Params([("recent".to_owned(), Value::Int(20))].into()),
        }),
        ..Strategy::bare("q4_0")
    };
    let run = |strategy: &Strategy, ids: &[u32]| {
        let outcome = lockstep
            .stream(&[strategy], ids)
            .unwrap()
            .remove(0)
            .unwrap();
        (outcome.tokens, outcome.memory)
    };
    let first = run(&a, &real.ids[..80]);
    let between = run(&b, &real.ids[300..400]);
    let second = run(&a, &real.ids[..80]);
    assert_eq!(first, second);
    assert_ne!(first.0[..79], between.0[..79]);
}

#[test]
fn decoding_equals_computing_everything_again() {
    let Some(real) = real() else { return };
    let exact = Strategy::bare("f32");
    let n_embd = real.model.spec().n_embd;
    let decoded = real.alone(&exact, &real.ids[..65], 64);
    for n in [1, 2, 3, 8, 16, 31, 48, 64, 65] {
        let mut cache = real.cache(&exact);
        cache.admit(SeqId(0), Admission::Streaming).unwrap();
        let last = prefill(&real.model, &mut cache, SeqId(0), &real.ids[..n], 512);
        let last = last.unwrap().expect("at least one token");
        let again: Vec<u32> = last.rows.iter().map(|x| x.to_bits()).collect();
        assert!(
            decoded[(n - 1) * n_embd..n * n_embd] == again,
            "after {n} tokens"
        );
    }
}

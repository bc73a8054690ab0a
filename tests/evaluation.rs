//! The evaluator on a tiny random model: conventions by hand, protocols that read the stored cache, strategies that break.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kvlab::cache::stage::{Params, Value};
use kvlab::cache::strategy::{StageSpec, Strategy, Tail};
use kvlab::cache::{
    Admission, Batch, Built, Continuation, Geometry, KvCache, Materials, SeqId, StagedCache,
};
use kvlab::compute::cpu::Cpu;
use kvlab::engine::RepeatPrompt;
use kvlab::engine::clock::{ScriptedClock, SystemClock};
use kvlab::engine::sampler::Sampler;
use kvlab::eval::answers::{Asked, Branch, Generation};
use kvlab::eval::floor::Floor;
use kvlab::eval::lockstep::{Lockstep, Outcome, Outcomes};
use kvlab::model::geometry::geometry;
use kvlab::model::tiny::{TinyConfig, TinyModel};
use kvlab::model::transformer::{LanguageModel, Transformer};
use kvlab::model::{ModelError, ModelSpec, Role, WeightSource};

const TEXT: &str = "Whoever counts tokens must say which ones: the first of a window has no query before it, \
and the first of a continuation is foretold by a query that never read the cache.";

/// The model's vocabulary are the 256 bytes.
fn ids(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

struct Tiny {
    model: Transformer<Cpu>,
    geometry: Geometry,
    clock: SystemClock,
    built: Built,
}

impl Tiny {
    fn new(weights: impl WeightSource + 'static) -> Self {
        let model = Transformer::<Cpu>::load(Arc::new(weights)).unwrap();
        let geometry = geometry(model.spec(), 512);
        Self {
            model,
            geometry,
            clock: SystemClock::new(),
            built: Built::default(),
        }
    }

    fn random() -> Self {
        Self::new(TinyModel::new(&TinyConfig::default()))
    }

    fn lockstep(&self) -> Lockstep<'_> {
        Lockstep {
            model: &self.model,
            geometry: &self.geometry,
            calibration: None,
            backing_dir: None,
            built: &self.built,
            chunk: 13,
            clock: &self.clock,
            repeat: None,
            latency_steps: 0,
            memory_every: 0,
            layer_queries: 0,
        }
    }

    fn cache(&self, strategy: &Strategy) -> StagedCache {
        let materials = Materials {
            geometry: &self.geometry,
            calibration: None,
            backing_dir: None,
        };
        StagedCache::new(strategy, materials).unwrap()
    }

    /// −ln p of each token after the first, from one pass over all of them, in f64. The pass is a prefill: retention acts
    /// when it is over.
    fn one_pass(&self, strategy: &Strategy, ids: &[u32]) -> Vec<f64> {
        let mut cache = self.cache(strategy);
        let seq = SeqId(3);
        cache.admit(seq, Admission::Context).unwrap();
        let batch = Batch::single(seq, 0..ids.len() as u32);
        let hidden = self.model.step(&batch, ids, &mut cache).unwrap();
        cache.compress(seq, Continuation::Strategy).unwrap();
        let mut logits = vec![0.0f32; self.model.spec().n_vocab];
        (1..ids.len())
            .map(|i| {
                self.model.logits(&hidden, i - 1..i, &mut logits);
                let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
                sum.ln() - f64::from(logits[ids[i] as usize])
            })
            .collect()
    }
}

fn window(recent: i64, sinks: i64) -> Strategy {
    let params = [("recent", recent), ("sinks", sinks)];
    Strategy {
        label: "window".into(),
        retain: Some(StageSpec {
            name: "window".into(),
            params: Params(params.map(|(k, v)| (k.to_owned(), Value::Int(v))).into()),
        }),
        ..Strategy::bare("f32")
    }
}

fn only(outcomes: Outcomes) -> Outcome {
    let [outcome] = <[_; 1]>::try_from(outcomes).unwrap_or_else(|o| panic!("{} outcomes", o.len()));
    outcome.unwrap()
}

fn sum(x: &[f64]) -> f64 {
    x.iter().sum()
}

/// With a clock that moves by 1 ms at each reading, both take from one reading to the next.
#[test]
fn a_repetition_s_time_is_no_part_of_a_compression_s() {
    let tiny = Tiny::random();
    let clock = ScriptedClock::new(Duration::from_millis(1));
    let prompt = RepeatPrompt {
        first: vec![1, 2],
        later: vec![3],
        then: vec![4],
    };
    let lockstep = Lockstep {
        clock: &clock,
        repeat: Some(&prompt),
        latency_steps: 2,
        ..tiny.lockstep()
    };
    let kvzip = Strategy {
        label: "kvzip".into(),
        retain: Some(StageSpec {
            name: "kvzip".into(),
            params: Params([("tokens".to_owned(), Value::Int(50))].into()),
        }),
        ..Strategy::bare("f16")
    };
    let plain = Strategy::bare("f16");
    let entrants = [&plain, &kvzip].map(|s| (s, Continuation::Exact));
    let outcomes = lockstep.compress_once(&entrants, &ids(TEXT), 100, Floor::Leave);
    let times: Vec<(f64, Option<f64>)> = outcomes
        .unwrap()
        .into_iter()
        .map(|outcome| outcome.unwrap().latency.unwrap())
        .map(|latency| (latency.compress_ms, latency.repetition_ms))
        .collect();
    assert_eq!(times, [(1.0, Some(0.0)), (1.0, Some(1.0))]);
}

/// One text under each convention: which tokens are scored, perplexity per token, bits per byte.
#[test]
fn conventions_are_those_of_a_count_by_hand() {
    let tiny = Tiny::random();
    let lockstep = tiny.lockstep();
    let exact = Strategy::bare("f32");
    let text = ids(TEXT);
    let close = |what: &str, outcome: &Outcome, by_hand: &[f64]| {
        assert_eq!(outcome.tokens.len(), by_hand.len(), "{what}: tokens scored");
        for (i, (token, nll)) in outcome.tokens.iter().zip(by_hand).enumerate() {
            assert!(
                (token.nll - nll).abs() < 1e-5,
                "{what}, {i}: {token:?}, by hand {nll}"
            );
            assert_eq!(
                (token.nll, token.kld, token.same_top),
                (token.nll_reference, 0.0, true)
            );
        }
        let per_token = (sum(by_hand) / by_hand.len() as f64).exp();
        // A token is a byte here.
        let bits_per_byte = sum(by_hand) / std::f64::consts::LN_2 / by_hand.len() as f64;
        assert!((per_token.log2() - bits_per_byte).abs() < 1e-12);
        per_token
    };

    // The whole text as one window, and as two whose stride is their length: each window starts without a past.
    let whole = only(lockstep.stream(&[&exact], &text).unwrap());
    let whole = close("one window", &whole, &tiny.one_pass(&exact, &text));
    let half = text.len() / 2;
    let (mut by_hand, mut scored) = (Vec::new(), 0);
    for window in text.chunks_exact(half) {
        let outcome = only(lockstep.stream(&[&exact], window).unwrap());
        let nll = tiny.one_pass(&exact, window);
        close("a window", &outcome, &nll);
        scored += outcome.tokens.len();
        by_hand.extend(nll);
    }
    assert_eq!(scored, 2 * (half - 1));
    let two = (sum(&by_hand) / by_hand.len() as f64).exp();

    // A BOS in front of it: every token of the text is a target.
    let with_bos: Vec<u32> = std::iter::once(0).chain(text.iter().copied()).collect();
    let outcome = only(lockstep.stream(&[&exact], &with_bos).unwrap());
    assert_eq!(outcome.tokens.len(), TEXT.len());
    let bos = close("BOS", &outcome, &tiny.one_pass(&exact, &with_bos));

    // A continuation: its first token has no query that reads the compressed cache.
    let context = 100;
    let entrant = [(&exact, Continuation::Strategy)];
    let outcome = only(
        lockstep
            .compress_once(&entrant, &text, context, Floor::Leave)
            .unwrap(),
    );
    let by_hand = tiny.one_pass(&exact, &text);
    let once = close("compress-once", &outcome, &by_hand[context..]);
    assert_eq!(outcome.tokens.len(), TEXT.len() - context - 1);

    let mut all = [whole, two, bos, once];
    all.sort_by(f64::total_cmp);
    assert!(
        all.windows(2).all(|w| w[1] / w[0] > 1.000_1),
        "{all:?}: conventions differ"
    );
}

/// A score from the pass that fills the cache says nothing about what is stored afterwards; the protocols do.
#[test]
fn a_one_pass_score_never_reads_what_was_evicted_and_the_protocols_do() {
    let tiny = Tiny::random();
    let text = ids(TEXT);
    let evicting = window(8, 0);
    let full = tiny.one_pass(&Strategy::bare("f32"), &text);
    assert_eq!(tiny.one_pass(&evicting, &text), full);
    let context = 100;
    for rule in [Continuation::Strategy, Continuation::Exact] {
        let run = tiny
            .lockstep()
            .compress_once(&[(&evicting, rule)], &text, context, Floor::Run);
        let outcome = only(run.unwrap());
        let off = |i: usize| (outcome.tokens[i].nll - full[context + i]).abs();
        let n_off = (0..outcome.tokens.len()).filter(|&i| off(i) > 1e-3).count();
        assert!(
            n_off * 10 > 9 * outcome.tokens.len(),
            "{rule:?}: {n_off} tokens noticed"
        );
        assert!(outcome.tokens.iter().map(|t| t.kld).sum::<f64>() > 1e-2);
        assert!(
            outcome
                .nll_floor
                .is_some_and(|floor| (floor - sum(&full[context..])).abs() > 1e-2)
        );
    }
    let streamed = only(tiny.lockstep().stream(&[&evicting], &text).unwrap());
    // A step brings row 8 and is over before row 0 leaves: the query at 9 is the first that misses it.
    let (early, late) = streamed.tokens.split_at(9);
    assert!(early.iter().all(|t| t.kld == 0.0));
    assert!(late.iter().all(|t| t.kld > 0.0));
}

/// Values of the first layer are beyond the largest f16.
struct Loud(TinyModel);

impl WeightSource for Loud {
    fn spec(&self) -> &ModelSpec {
        self.0.spec()
    }
    fn shape(&self, role: Role, layer: usize) -> Option<(usize, usize)> {
        self.0.shape(role, layer)
    }
    fn rows_f32(
        &self,
        role: Role,
        layer: usize,
        first: usize,
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        self.0.rows_f32(role, layer, first, out)?;
        if (role, layer) == (Role::V, 0) {
            out.iter_mut().for_each(|x| *x *= 1e6);
        }
        Ok(())
    }
}

#[test]
fn a_strategy_that_breaks_is_named_and_stops_alone() {
    let tiny = Tiny::new(Loud(TinyModel::new(&TinyConfig::default())));
    let text = ids(TEXT);
    let strategies = ["f16", "f32", "bf16"].map(Strategy::bare);
    let gone = PathBuf::from("no-such-folder");
    let mut parked = Strategy::bare("f32");
    parked.place = Some(StageSpec::plain("file"));
    let [f16, f32, bf16] = strategies.each_ref();
    let all = [f16, f32, bf16, &parked];
    let lockstep = Lockstep {
        backing_dir: Some(&gone),
        ..tiny.lockstep()
    };
    let streamed = lockstep.stream(&all, &text).unwrap();
    let entrants = all.map(|s| (s, Continuation::Strategy));
    let compressed = lockstep
        .compress_once(&entrants, &text, 100, Floor::Leave)
        .unwrap();
    for outcomes in [streamed, compressed] {
        let [f16, f32, bf16, parked] = <[_; 4]>::try_from(outcomes).unwrap_or_else(|_| panic!());
        let error = f16.unwrap_err().to_string();
        assert!(
            error.contains("non-finite K at layer 1, KV head 0, position"),
            "{error}"
        );
        let error = parked.unwrap_err().to_string();
        assert!(
            error.contains("no-such-folder is not a directory"),
            "{error}"
        );
        assert!(f32.unwrap().tokens.iter().all(|t| t.kld == 0.0));
        let bf16 = bf16.unwrap();
        assert!(bf16.tokens.iter().map(|t| t.kld).sum::<f64>() > 0.0);
    }
}

/// One context and one reference serve both continuations: each strategy ends as if it had run alone.
#[test]
fn continuations_side_by_side_equal_each_alone() {
    let tiny = Tiny::random();
    let text = ids(TEXT);
    let q4_0 = Strategy {
        tail: Tail::both(8),
        ..Strategy::bare("q4_0")
    };
    let evicting = window(30, 2);
    let entrants: Vec<(&Strategy, Continuation)> = [Continuation::Exact, Continuation::Strategy]
        .into_iter()
        .flat_map(|c| [(&q4_0, c), (&evicting, c)])
        .collect();
    let run = |entrants: &[(&Strategy, Continuation)]| -> Vec<Outcome> {
        let outcomes = tiny
            .lockstep()
            .compress_once(entrants, &text, 100, Floor::Run)
            .unwrap();
        outcomes.into_iter().map(Result::unwrap).collect()
    };
    let together = run(&entrants);
    for (outcome, entrant) in together.iter().zip(&entrants) {
        let alone = &run(&[*entrant])[0];
        assert_eq!(outcome.tokens, alone.tokens);
        assert_eq!(outcome.memory, alone.memory);
        assert_eq!(outcome.nll_floor, alone.nll_floor);
        let n_records = 1 + usize::from(entrant.1 == Continuation::Strategy);
        assert_eq!(outcome.memory.len(), n_records);
    }
    assert_ne!(together[0].tokens, together[2].tokens);
}

/// Measuring along the way cuts the steps and nothing else.
#[test]
fn memory_along_the_way_changes_no_score() {
    let tiny = Tiny::random();
    let text = ids(TEXT);
    let strategies = [
        Strategy {
            tail: Tail::both(8),
            sinks: 2,
            ..Strategy::bare("q4_0")
        },
        window(30, 2),
        Strategy::bare("nvfp4"),
    ];
    let all: Vec<&Strategy> = strategies.iter().collect();
    let both: Vec<(&Strategy, Continuation)> = strategies
        .iter()
        .flat_map(|s| [(s, Continuation::Strategy), (s, Continuation::Exact)])
        .collect();
    let plain = Lockstep {
        chunk: 64,
        ..tiny.lockstep()
    };
    let tracked = Lockstep {
        memory_every: 16,
        ..plain
    };
    let run = |lockstep: &Lockstep<'_>| -> Vec<Outcome> {
        let streamed = lockstep.stream(&all, &text).unwrap();
        let once = lockstep
            .compress_once(&both, &text, 100, Floor::Leave)
            .unwrap();
        streamed
            .into_iter()
            .chain(once)
            .map(Result::unwrap)
            .collect()
    };
    let lengths =
        |from: usize| -> Vec<usize> { (from..=text.len()).filter(|n| n % 16 == 0).collect() };
    let (with, without) = (run(&tracked), run(&plain));
    for (i, (with, without)) in with.iter().zip(&without).enumerate() {
        assert_eq!(with.tokens, without.tokens, "{i}");
        assert!(without.memory_track.is_empty());
        assert_eq!(with.memory.len(), without.memory.len());
        let got: Vec<usize> = with.memory_track.iter().map(|m| m.n_tokens).collect();
        let expected = match i {
            0..3 => lengths(1),
            // An exact continuation is no part of the strategy.
            _ if (i - 3) % 2 == 1 => Vec::new(),
            _ => [vec![100], lengths(101)].concat(),
        };
        assert_eq!(got, expected, "{i}");
    }
    // What is measured on the way is what a cache that stops there holds.
    let stopped = plain.stream(&all, &text[..96]).unwrap();
    for (tracked, stopped) in with.iter().zip(stopped) {
        let there = tracked
            .memory_track
            .iter()
            .find(|m| m.n_tokens == 96)
            .unwrap();
        let stopped = stopped.unwrap().memory[0];
        let rows = |m: &kvlab::eval::records::MemoryRecord| {
            let r = m.report;
            (
                r.payload_bytes,
                r.scale_bytes,
                r.exact_bytes,
                r.rows_live,
                r.rows_seen,
            )
        };
        assert_eq!(rows(there), rows(&stopped));
    }
}

#[test]
fn a_strategy_is_built_once_for_all_items() {
    let tiny = Tiny::random();
    let materials = Materials {
        geometry: &tiny.geometry,
        calibration: None,
        backing_dir: None,
    };
    let (a, b) = (Strategy::bare("q8_0"), Strategy::bare("q4_0"));
    let build = |s| tiny.built.stages(s, materials).unwrap();
    let (first, other) = (build(&a), build(&b));
    assert!(!Arc::ptr_eq(&first, &other));
    tiny.lockstep().stream(&[&a, &b], &ids(TEXT)).unwrap();
    assert!(Arc::ptr_eq(&first, &build(&a)) && Arc::ptr_eq(&other, &build(&b)));
}

/// A context with two questions, the second one's options differing before their answers.
struct Quiz {
    context: Vec<u32>,
    /// `[question][option]` (query, target).
    options: Vec<Vec<(Vec<u32>, Vec<u32>)>>,
}

impl Quiz {
    fn new() -> Self {
        let option = |query: &str, target: &str| (ids(query), ids(target));
        Self {
            context: ids(&TEXT[..120]),
            options: vec![
                vec![option("?", " yes"), option("?", " no, not at all")],
                vec![
                    option("a first", "x"),
                    option("a second one", "yz"),
                    option("b", "x"),
                ],
            ],
        }
    }

    fn branches(&self) -> Vec<Vec<Branch<'_>>> {
        fn branch((query, target): &(Vec<u32>, Vec<u32>)) -> Branch<'_> {
            Branch { query, target }
        }
        let all = self.options.iter();
        all.map(|options| options.iter().map(branch).collect())
            .collect()
    }
}

fn answers(
    tiny: &Tiny,
    strategies: &[&Strategy],
    context: &[u32],
    questions: &[Vec<Branch<'_>>],
) -> Vec<Outcome> {
    let entrants: Vec<_> = strategies
        .iter()
        .map(|s| (*s, Continuation::Strategy))
        .collect();
    let asked = Asked {
        context,
        questions,
        generation: None,
    };
    let outcomes = tiny.lockstep().answer(&entrants, asked, &mut None).unwrap();
    outcomes.into_iter().map(Result::unwrap).collect()
}

/// The likelihood of an option is that of its tokens after context and query, in one pass; an f32 cache is the reference.
#[test]
fn options_score_as_one_pass_over_context_query_and_answer() {
    let tiny = Tiny::random();
    let quiz = Quiz::new();
    let exact = Strategy::bare("f32");
    let (f32, evicting) = (&exact, &window(30, 2));
    let outcomes = answers(&tiny, &[f32, evicting], &quiz.context, &quiz.branches());
    let mut at = 0;
    for (query, target) in quiz.options.iter().flatten() {
        let text = [&quiz.context[..], query, target].concat();
        let by_hand = tiny.one_pass(f32, &text);
        let by_hand = &by_hand[by_hand.len() - target.len()..];
        for (token, nll) in outcomes[0].tokens[at..].iter().zip(by_hand) {
            assert!((token.nll - nll).abs() < 1e-5, "{token:?}, by hand {nll}");
            assert_eq!((token.nll, token.kld), (token.nll_reference, 0.0));
            assert_eq!(token.is_greedy, token.is_greedy_reference);
        }
        // The first token of an answer reads the evicted cache too.
        let (lossy, full) = (outcomes[1].tokens[at], outcomes[0].tokens[at]);
        assert!(lossy.nll != full.nll && lossy.kld > 0.0, "{lossy:?}");
        assert_eq!(lossy.nll_reference, full.nll);
        at += target.len();
    }
    assert_eq!(outcomes[0].tokens.len(), at);
    assert_eq!(outcomes[0].memory.len(), 1);
    assert_eq!(outcomes[1].memory[0].n_tokens, quiz.context.len());
}

/// A question alone, in other company, or after another context with the same beginning: the same bits.
#[test]
fn questions_and_options_do_not_see_each_other() {
    let tiny = Tiny::random();
    let quiz = Quiz::new();
    let tailed = Strategy {
        tail: Tail::both(8),
        sinks: 4,
        ..Strategy::bare("q4_0")
    };
    let (q8, kivi) = (Strategy::bare("q8_0"), window(50, 4));
    let strategies = [&tailed, &q8, &kivi];
    let together = answers(&tiny, &strategies, &quiz.context, &quiz.branches());
    for (s, strategy) in strategies.into_iter().enumerate() {
        let mut at = 0;
        for branch in quiz.branches().into_iter().flatten() {
            let alone = &answers(&tiny, &[strategy], &quiz.context, &[vec![branch]])[0];
            let n = branch.target.len();
            assert_eq!(
                alone.tokens,
                together[s].tokens[at..at + n],
                "{}",
                strategy.label
            );
            assert_eq!(alone.memory, together[s].memory);
            at += n;
        }
    }
    // Thirty-two options in one step, as one by one.
    let many: Vec<(Vec<u32>, Vec<u32>)> = (0..32u32)
        .map(|i| (ids("so "), (0..=i % 7).map(|j| 40 + i + 3 * j).collect()))
        .collect();
    let options: Vec<Branch<'_>> = many
        .iter()
        .map(|(query, target)| Branch { query, target })
        .collect();
    let together = answers(
        &tiny,
        &[&tailed],
        &quiz.context,
        std::slice::from_ref(&options),
    );
    let mut at = 0;
    for option in options {
        let alone = answers(&tiny, &[&tailed], &quiz.context, &[vec![option]]);
        let n = option.target.len();
        assert_eq!(alone[0].tokens, together[0].tokens[at..at + n]);
        at += n;
    }
    let mut before = None;
    let entrants = strategies.map(|s| (s, Continuation::Strategy));
    for context in [
        &[&quiz.context[..70], &[3, 4, 5]].concat(),
        &quiz.context,
        &quiz.context[..50].to_vec(),
    ] {
        let questions = quiz.branches();
        let asked = Asked {
            context,
            questions: &questions,
            generation: None,
        };
        let outcomes = tiny
            .lockstep()
            .answer(&entrants, asked, &mut before)
            .unwrap();
        let alone = answers(&tiny, &strategies, context, &questions);
        for (outcome, alone) in outcomes.into_iter().map(Result::unwrap).zip(alone) {
            assert_eq!(outcome.tokens, alone.tokens);
            assert_eq!(outcome.memory, alone.memory);
        }
    }
}

/// Greedy answers: the reference's are the most likely tokens one by one, an f32 cache gives the same, a stop ends them.
#[test]
fn generated_answers_are_greedy_and_end_where_they_should() {
    let tiny = Tiny::random();
    let quiz = Quiz::new();
    let questions = quiz.branches();
    let exact = Strategy::bare("f32");
    let evicting = window(20, 1);
    let generate = |max_tokens: usize, is_over: &(dyn Fn(&[u32]) -> bool + Sync)| {
        let asked = Asked {
            context: &quiz.context,
            questions: &questions,
            generation: Some(Generation {
                max_tokens,
                sampler: Sampler::GREEDY,
                is_over,
            }),
        };
        let entrants = [&exact, &evicting].map(|s| (s, Continuation::Strategy));
        let outcomes = tiny.lockstep().answer(&entrants, asked, &mut None).unwrap();
        outcomes
            .into_iter()
            .map(|o| o.unwrap().generated)
            .collect::<Vec<_>>()
    };
    let long = generate(12, &|_| false);
    let mut text = [&quiz.context[..], &quiz.options[1][0].0].concat();
    let eos = &tiny.model.spec().eos_ids;
    let mut by_hand = Vec::new();
    while by_hand.len() < 12 {
        let mut cache = tiny.cache(&exact);
        cache.admit(SeqId(0), Admission::Streaming).unwrap();
        let n = text.len();
        let hidden = tiny
            .model
            .step(&Batch::single(SeqId(0), 0..n as u32), &text, &mut cache)
            .unwrap();
        let mut logits = vec![0.0; tiny.model.spec().n_vocab];
        tiny.model.logits(&hidden, n - 1..n, &mut logits);
        let best = (0..logits.len())
            .rev()
            .max_by(|a, b| logits[*a].total_cmp(&logits[*b]))
            .unwrap() as u32;
        if eos.contains(&best) {
            break;
        }
        by_hand.push(best);
        text.push(best);
    }
    assert_eq!(long[0].reference[1], by_hand);
    assert_eq!(long[0].strategy, long[0].reference);
    assert_eq!(long[1].reference, long[0].reference);
    assert_eq!(long[1].strategy.len(), 2);
    let short = generate(12, &|ids| ids.len() == 3);
    assert_eq!(short[0].reference[1], by_hand[..3.min(by_hand.len())]);
}

/// Texts: an f32 cache writes the reference's, greedily and with noise; another one's text is scored by its own cache as it was
/// generated, so that each greedy token is that cache's most likely one.
#[test]
fn texts_are_written_and_scored_by_the_same_cache() {
    let tiny = Tiny::random();
    let text = ids(&TEXT[..90]);
    let (exact, evicting) = (Strategy::bare("f32"), window(20, 1));
    let entrants = [&exact, &evicting].map(|s| (s, Continuation::Strategy));
    let write = |sampler: Sampler, seedless: bool| {
        let generation = Generation {
            max_tokens: 24,
            sampler,
            is_over: &|_| false,
        };
        let outcomes = tiny.lockstep().go_on(&entrants, &text, generation).unwrap();
        let outcomes: Vec<Outcome> = outcomes.into_iter().map(Result::unwrap).collect();
        let written = |o: &Outcome| o.written.clone().unwrap();
        let (full, lossy) = (written(&outcomes[0]), written(&outcomes[1]));
        assert_eq!(full.tokens, full.tokens_reference);
        assert!(
            outcomes[0]
                .tokens
                .iter()
                .all(|t| t.nll == t.nll_reference && t.kld == 0.0)
        );
        let own: f64 = outcomes[0].tokens.iter().map(|t| t.nll).sum();
        assert!((own - full.nll_own_reference).abs() < 1e-9);
        assert_eq!(outcomes[1].tokens.len(), lossy.tokens.len());
        if seedless {
            assert!(outcomes.iter().flat_map(|o| &o.tokens).all(|t| t.is_greedy));
        }
        lossy.tokens
    };
    write(Sampler::GREEDY, true);
    let warm = |seed| Sampler {
        temperature: 1.0,
        top_p: 0.9,
        seed,
    };
    assert_eq!(write(warm(1), false), write(warm(1), false));
    assert_ne!(write(warm(1), false), write(warm(2), false));
}

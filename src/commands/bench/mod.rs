//! `kvlab bench`: tokens per second of prefill and decode, strategies beside each other.
//!
//! Invariant: everything that can be refused is refused before anything is timed; a strategy that fails its check is
//! still timed, marked, and makes the exit code 1. The machine's read rate comes first, before weights are touched and caches
//! filled: its buffer then adds to no row's peak memory.

mod cells;

use std::io::Write;
use std::sync::Arc;

use anyhow::{Context, bail};
use indicatif::ProgressBar;

use super::progress::{self, Bar};
use super::session::{CALIBRATION_WINDOW, Learner};
use super::{Exit, limits, lookup, named};
use crate::bundle::environment::{Environment, load_average_now};
use crate::cache::Geometry;
use crate::cache::strategy::Strategy;
use crate::cli::{BenchArgs, BenchForm, Counts};
use crate::compute::cpu::Cpu;
use crate::config::Plan;
use crate::data::Lookup;
use crate::engine::clock::{Clock, SystemClock};
use crate::engine::{LinearWatch, Tally};
use crate::eval::bench::bandwidth::{BUFFER_BYTES, read_bytes_per_s};
use crate::eval::bench::{Bench, Pool, Schedule, Work, gate};
use crate::model::geometry::geometry;
use crate::model::ops::{Arithmetic, Load, needed};
use crate::model::source::{FetchProgress, ModelDir, Silent, resolve};
use crate::model::transformer::Transformer;
use crate::model::{self, Role, Tokenizer, WeightSource};
use crate::report::bench::{Entrant, Host, Sheet, csv, json, markdown};
use crate::report::columns::side;

/// About how many tokens of prefill one decoded token is worth, for the time that is left.
const DECODED: u64 = 8;

/// Measures and prints.
///
/// # Errors
/// A name, a number or a model that can't be used, a strategy that breaks down, a failed write.
pub fn bench(args: &BenchArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let mut plan = plan(args)?;
    let wanted = Wanted::of(args)?;
    if let Some(strategy) = &args.cell {
        plan.strategies = vec![cells::strategy(strategy)?];
    }
    let host = Environment::capture()?;
    let fetching: &dyn FetchProgress = if args.quiet { &Silent } else { &Bar::default() };
    let opened = Opened::new(args, &plan, &wanted, fetching)?;
    if args.cell.is_some() {
        return cells::hold(&opened, &plan, &wanted, out);
    }
    let mut sheet = empty_sheet(&plan, host, opened.weights.as_ref())?;
    sheet.read_bytes_per_s = read_rates(&SystemClock::new(), &opened.pools);
    let mut strategies = plan.strategies.clone();
    if wanted.no_cache() {
        strategies.push(Strategy {
            label: "no cache".to_owned(),
            ..Strategy::bare("f32")
        });
    }
    opened.with_bench(&plan, fetching, |bench| {
        measure(
            bench,
            &strategies,
            &wanted,
            (&opened.pools, args.quiet),
            &mut sheet,
        )
    })?;
    if args.isolate {
        sheet.cells = cells::isolated(args, &plan.strategies, &wanted)?;
    }
    sheet.host.load_end = load_average_now().map(|l| l[0]);
    let text = match args.output {
        BenchForm::Md => markdown(&sheet),
        BenchForm::Csv => csv(&sheet),
        BenchForm::Json => json(&sheet),
    };
    out.write_all(text.as_bytes())?;
    let holds = sheet.entrants.iter().all(|e| e.gate.holds());
    Ok(if holds { Exit::Ok } else { Exit::Regression })
}

/// What is there before anything computes.
struct Opened {
    weights: Arc<dyn WeightSource>,
    tokenizer: Tokenizer,
    geometry: Geometry,
    ids: Vec<u32>,
    pools: Vec<Pool>,
    places: Lookup,
}

impl Opened {
    fn new(
        args: &BenchArgs,
        plan: &Plan,
        wanted: &Wanted,
        fetching: &dyn FetchProgress,
    ) -> anyhow::Result<Self> {
        let models_dir = ModelDir::locate(args.places.models_dir.as_deref())?;
        let loaded = model::load(&resolve(&plan.model, &models_dir, fetching)?)?;
        wanted.check(loaded.spec.context_length)?;
        let pools = wanted.pools()?;
        let places = lookup(&args.places);
        let text = plan.data[0].load(&places)?;
        let ids = loaded.tokenizer.encode(&text.text)?;
        if ids.is_empty() {
            bail!(
                "{}: the text has no tokens: give another with -f",
                text.name
            );
        }
        let longest = wanted.longest().max(gate::TOKENS).max(CALIBRATION_WINDOW);
        let geometry = geometry(&loaded.spec, longest.min(loaded.spec.context_length));
        plan.check_as_read(&limits(plan, &loaded, &geometry))?;
        Ok(Self {
            geometry,
            weights: Arc::from(loaded.weights),
            tokenizer: loaded.tokenizer,
            ids,
            pools,
            places,
        })
    }

    /// Work with the model in memory, and what the strategies learned.
    fn with_bench<T>(
        &self,
        plan: &Plan,
        fetching: &dyn FetchProgress,
        work: impl FnOnce(&Bench<'_>) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
        let (linear, scoring) = (Tally::default(), Arc::default());
        // Within a pool, so that no other threads are ever started.
        let widest = &self.pools[self.pools.len() - 1].pool;
        let weights = Arc::clone(&self.weights);
        let cpu = widest.install(|| Cpu::load(weights, plan.arithmetic))?;
        let model = Transformer::over(LinearWatch::new(cpu, clock.as_ref(), &linear));
        let learner = Learner {
            model: &model,
            tokenizer: &self.tokenizer,
            geometry: &self.geometry,
        };
        let calibration = learner.calibrate(plan, &self.places, fetching)?;
        work(&Bench {
            model: &model,
            linear: &linear,
            scoring: &scoring,
            geometry: &self.geometry,
            calibration: calibration.as_ref(),
            clock: &clock,
            text: &self.ids,
        })
    }
}

/// Bytes per second that each pool reads.
fn read_rates(clock: &SystemClock, pools: &[Pool]) -> Vec<(usize, f64)> {
    let buffer = vec![1u64; BUFFER_BYTES / size_of::<u64>()];
    let rates = pools.iter();
    let rates = rates.map(|p| (p.n_threads, read_bytes_per_s(clock, p, &buffer)));
    rates.collect()
}

/// Checks and times; fills the sheet.
fn measure(
    bench: &Bench<'_>,
    strategies: &[Strategy],
    wanted: &Wanted,
    (pools, quiet): (&[Pool], bool),
    sheet: &mut Sheet,
) -> anyhow::Result<()> {
    let refs: Vec<&Strategy> = strategies.iter().collect();
    let bar = if quiet {
        ProgressBar::hidden()
    } else {
        progress::items(wanted.work(strategies.len()) as usize)
    };
    bar.set_message("checking");
    let check = (1 + DECODED) * gate::TOKENS as u64 / 2;
    let gates = gate::check(bench, &refs, pools, &mut || bar.inc(check))?;
    sheet.entrants = strategies
        .iter()
        .zip(gates)
        .map(|(s, gate)| Entrant {
            label: s.label.clone(),
            type_k: side(&s.project_k, &s.encode_k),
            type_v: side(&s.project_v, &s.encode_v),
            gate,
        })
        .collect();
    bar.set_message("timing");
    let schedule = Schedule {
        tests: &wanted.tests,
        depths: &wanted.depths,
        pools,
        repetitions: wanted.repetitions,
        no_cache: wanted.no_cache().then(|| strategies.len() - 1),
    };
    sheet.rows = bench.run(&refs, &schedule, &mut |work, n| bar.inc(cost(work, n)))?;
    bar.finish_and_clear();
    Ok(())
}

/// The experiment that the names stand for; it lends its reading of strategies, texts and calibration.
fn plan(args: &BenchArgs) -> anyhow::Result<Plan> {
    named::experiment(
        &args.strategies,
        &named::Settings {
            model: &args.model,
            text: &args.text,
            arithmetic: &args.arithmetic,
        },
    )
}

/// What is to be measured, in numbers.
struct Wanted {
    tests: Vec<(Work, usize)>,
    depths: Vec<usize>,
    threads: Vec<usize>,
    repetitions: usize,
}

impl Wanted {
    fn of(args: &BenchArgs) -> anyhow::Result<Self> {
        let prompts = flat(&args.n_prompt).into_iter().map(|n| (Work::Prefill, n));
        let decodes = flat(&args.n_gen).into_iter().map(|n| (Work::Decode, n));
        let scores = flat(&args.n_score).into_iter().map(|n| (Work::Score, n));
        let recomputed = flat(&args.no_cache).into_iter();
        let recomputed = recomputed.map(|n| (Work::Recompute, n));
        let tests = prompts.chain(decodes).chain(scores).chain(recomputed);
        let tests: Vec<_> = tests.filter(|(_, n)| *n > 0).collect();
        if tests.is_empty() {
            bail!("nothing to measure: -p, -n, --n-score and --no-cache are all 0");
        }
        let mut threads = flat(&args.threads);
        if threads.is_empty() {
            threads.push(std::thread::available_parallelism().map_or(1, |n| n.get()));
        }
        if let Some(n) = threads.iter().find(|&&n| n == 0 || n > 1024) {
            bail!("-t {n}: threads must be 1 to 1024");
        }
        Ok(Self {
            tests,
            depths: flat(&args.n_depth),
            threads,
            repetitions: args.repetitions.into(),
        })
    }

    /// Whether decoding without a cache is among the tests.
    fn no_cache(&self) -> bool {
        self.tests.iter().any(|(work, _)| *work == Work::Recompute)
    }

    /// Positions of the longest run.
    fn longest(&self) -> usize {
        let longest = self.tests.iter().map(|(_, n)| n).max();
        longest.unwrap_or(&0) + self.depths.iter().max().unwrap_or(&0)
    }

    fn check(&self, context_length: usize) -> anyhow::Result<()> {
        let longest = self.longest();
        if longest > context_length {
            bail!(
                "depth and test together reach {longest} tokens, the model's context is {context_length}: lower -d, -p or -n"
            );
        }
        Ok(())
    }

    fn pools(&self) -> anyhow::Result<Vec<Pool>> {
        let build = |&n_threads: &usize| {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(n_threads)
                .build();
            let pool = pool.with_context(|| format!("{n_threads} threads"))?;
            Ok(Pool { n_threads, pool })
        };
        self.threads.iter().map(build).collect()
    }

    /// All of it in tokens of prefill, for the progress.
    fn work(&self, n_strategies: usize) -> u64 {
        let (without, with): (Vec<_>, Vec<_>) = self
            .tests
            .iter()
            .partition(|(work, _)| *work == Work::Recompute);
        let runs: u64 = with.iter().map(|&&(work, n)| cost(work, n)).sum();
        let times = (self.threads.len() * self.repetitions) as u64;
        let depths = self.depths.iter().map(|&d| d as u64);
        let recomputed: u64 = depths
            .flat_map(|d| {
                without
                    .iter()
                    .map(move |(_, n)| *n as u64 * (d + *n as u64))
            })
            .sum();
        let check = cost(Work::Prefill, gate::TOKENS) + cost(Work::Decode, gate::TOKENS);
        let deepest = *self.depths.iter().max().unwrap_or(&0) as u64;
        let each = runs * times * self.depths.len() as u64 + check + deepest;
        n_strategies as u64 * each + times * recomputed
    }
}

/// The numbers of a list, rising, each once.
fn flat(counts: &[Counts]) -> Vec<usize> {
    let mut all: Vec<usize> = counts.iter().flat_map(|c| c.0.iter().copied()).collect();
    all.sort_unstable();
    all.dedup();
    all
}

fn cost(work: Work, n: usize) -> u64 {
    let each = if work == Work::Decode { DECODED } else { 1 };
    each * n as u64
}

/// What is known before anything is measured.
fn empty_sheet(
    plan: &Plan,
    environment: Environment,
    weights: &dyn WeightSource,
) -> anyhow::Result<Sheet> {
    let host = Host {
        n_cores: environment.n_cores,
        cpu_flags: environment.engine.cpu_flags.clone(),
        load_start: environment.load_average.map(|l| l[0]),
        load_end: None,
    };
    let spec = weights.spec();
    let outer = Role::OUTER.map(|role| (role, 0));
    let layers = (0..spec.n_layers).flat_map(|layer| Role::OF_LAYER.map(|role| (role, layer)));
    let all: Vec<(Role, usize)> = outer.into_iter().chain(layers).collect();
    let shapes = all
        .iter()
        .filter_map(|&(role, layer)| weights.shape(role, layer));
    let stored = |(role, layer)| weights.stored_bytes(role, layer);
    let read = needed(weights)?;
    let commit = environment.source_commit.map(|c| format!(" ({c})"));
    Ok(Sheet {
        build: environment.engine.kvlab_version + &commit.unwrap_or_default(),
        cpu: environment
            .cpu_model
            .unwrap_or_else(|| environment.engine.arch.clone()),
        model: plan.model.clone(),
        model_bytes: all.iter().copied().filter_map(stored).sum(),
        n_params: shapes.map(|(rows, cols)| (rows * cols) as u64).sum(),
        weight_bytes: read.iter().filter_map(|t| stored((t.role, t.layer))).sum(),
        backend: match plan.arithmetic {
            Arithmetic::F32 => "cpu".to_owned(),
            other => format!("cpu {}", other.name()),
        },
        entrants: Vec::new(),
        read_bytes_per_s: Vec::new(),
        host,
        rows: Vec::new(),
        cells: Vec::new(),
    })
}

//! `kvlab train`: fits a gate to what a model attends to when it repeats texts, and writes its weights.
//!
//! Invariants: all that can be refused is refused before a window is read; the weights appear whole or not at all, with
//! the model, the texts and the settings that they come from.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::Arc;

use anyhow::{Context, bail};

use super::progress::Bar;
use super::session::repeat_prompt;
use super::{Exit, lookup};
use crate::bundle::write_atomic;
use crate::cache::retain::gate::Weights;
use crate::cache::strategy::Strategy;
use crate::cache::{Admission, Geometry, KvCache, Materials, SeqId, StagedCache};
use crate::cli::TrainArgs;
use crate::compute::cpu::Cpu;
use crate::config::{Training, load_training};
use crate::data::Passages;
use crate::engine::repetition::{MAX_PROMPT, repetition};
use crate::engine::{CHUNK, ContextTape, Extras, Recording, RepeatPrompt, prefill};
use crate::model::WeightSource;
use crate::model::geometry::geometry;
use crate::model::ops::Arithmetic;
use crate::model::source::{FetchProgress, ModelDir, Silent, resolve};
use crate::model::transformer::{LanguageModel, Transformer};
use crate::train::features::Target;
use crate::train::gate::{EndToEnd, Fitted, Fitting, JUDGED, LayerFit, Use};
use crate::train::judge::Judged;

/// The sequence that a window is.
const SEQ: SeqId = SeqId(0);

/// A window of a text.
struct Window {
    usage: Use,
    ids: Vec<u32>,
}

/// Trains, and says how well the gate does on what was held out.
///
/// # Errors
/// A file, model or text that can't be used; weights that can't be written.
pub fn train(args: &TrainArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let training = load_training(&args.file, &args.set)?;
    let threads = args.threads.map_or(0, usize::from);
    // A pool that exists already (in tests) is as good: threads change no number.
    let _ = rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .build_global();
    let dir = ModelDir::locate(args.places.models_dir.as_deref())?;
    let progress: &dyn FetchProgress = if args.quiet { &Silent } else { &Bar::default() };
    let loaded = crate::model::load(&resolve(&training.model, &dir, progress)?)?;
    let spec = loaded.spec.clone();
    let longest = longest(&training, spec.context_length)?;
    let geometry = geometry(&spec, longest);
    let texts = Windows {
        tokenizer: &loaded.tokenizer,
        training: &training,
        args,
    };
    let windows = texts.to_fit()?;
    let prompt = repeat_prompt(&loaded.tokenizer)?;
    let source: Arc<dyn WeightSource> = Arc::from(loaded.weights);
    let model = Transformer::<Cpu>::load_in(source.clone(), Arithmetic::F32)?;
    let teacher = Teacher {
        model: &model,
        geometry: &geometry,
        prompt: &prompt,
    };
    let mut fitting = Fitting::new(&geometry, spec.n_embd, training.settings.clone());
    let bar = bar(args, windows.len());
    for window in &windows {
        teacher.teach(&mut fitting, window)?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    let mut fitted = fitting.finish().map_err(anyhow::Error::msg)?;
    let divergence = match &training.end_to_end {
        None => None,
        Some(settings) => {
            let weights = &mut fitted.weights;
            Some(weigh_heads(settings, &texts, source, &teacher, weights)?)
        }
    };
    let bytes = fitted
        .weights
        .file(origin(&training, &loaded.sha256, divergence))
        .map_err(anyhow::Error::msg)?;
    if let Some(parent) = training.file.parent() {
        std::fs::create_dir_all(parent)
            .with_context(|| format!("creating {}", parent.display()))?;
    }
    write_atomic(&training.file, &bytes)?;
    report(&training, &fitting, (&fitted, divergence), out)?;
    Ok(Exit::Ok)
}

/// Positions that the longest reading needs.
fn longest(training: &Training, context_length: usize) -> anyhow::Result<usize> {
    let twice = 2 * training.window + MAX_PROMPT;
    let once = training.end_to_end.map_or(0, |e| e.window);
    let (key, n, longest) = match twice >= once {
        true => ("data.window: a window read twice", training.window, twice),
        false => ("gate.end_to_end.window: a window", once, once),
    };
    if longest > context_length {
        bail!(
            "{key} needs {longest} positions at {n} tokens, `{}` has {context_length}: make it smaller",
            training.model
        );
    }
    Ok(longest)
}

fn bar(args: &TrainArgs, n: usize) -> indicatif::ProgressBar {
    match args.quiet {
        true => indicatif::ProgressBar::hidden(),
        false => super::progress::items(n),
    }
}

/// Where windows come from.
struct Windows<'a> {
    tokenizer: &'a crate::model::tokenizer::Tokenizer,
    training: &'a Training,
    args: &'a TrainArgs,
}

impl Windows<'_> {
    /// Windows of `n_tokens`, so many of each text, spread over it.
    fn take(&self, n_tokens: usize, of_each: &[usize]) -> anyhow::Result<Vec<Vec<u32>>> {
        let places = lookup(&self.args.places);
        let mut all = Vec::new();
        for (text, &n) in self.training.texts.iter().zip(of_each) {
            let text = text.load(&places)?;
            let passages = text.passages(n_tokens, (n, Passages::Spread), |t| {
                self.tokenizer.encode(t).map_err(anyhow::Error::from)
            })?;
            all.extend(passages.into_iter().map(|p| p.ids));
        }
        Ok(all)
    }

    /// Those to fit to, every n-th of them held out.
    fn to_fit(&self) -> anyhow::Result<Vec<Window>> {
        let training = self.training;
        let all = self.take(training.window, &training.windows)?;
        let usage = |i: usize| match i % training.held_out == training.held_out / 2 {
            true => Use::HeldOut,
            false => Use::Fit,
        };
        let windows = all.into_iter().enumerate();
        Ok(windows
            .map(|(i, ids)| Window {
                usage: usage(i),
                ids,
            })
            .collect())
    }
}

/// What shows the gate what it should have kept.
struct Teacher<'a> {
    model: &'a dyn LanguageModel,
    geometry: &'a Geometry,
    prompt: &'a RepeatPrompt,
}

impl Teacher<'_> {
    /// Reads a window exactly.
    fn read(&self, ids: &[u32]) -> anyhow::Result<(StagedCache, ContextTape)> {
        let materials = Materials {
            geometry: self.geometry,
            calibration: None,
            backing_dir: None,
        };
        let mut cache = StagedCache::new(&Strategy::bare("f32"), materials)?;
        cache.admit(SEQ, Admission::Streaming)?;
        let extras = Extras {
            hidden: true,
            queries: 0,
        };
        let mut recording = Recording::with(cache, SEQ, extras);
        prefill(self.model, &mut recording, SEQ, ids, CHUNK)?;
        Ok(recording.into_parts())
    }

    fn teach(&self, fitting: &mut Fitting, window: &Window) -> anyhow::Result<()> {
        let (mut cache, tape) = self.read(&window.ids)?;
        let seen = repetition(
            self.model,
            (&mut cache, SEQ, SeqId(SEQ.0 + 1)),
            self.geometry,
            (&window.ids, &tape),
            self.prompt,
        )?;
        fitting.add(self.geometry, &tape, &seen, window.usage);
        Ok(())
    }
}

/// Weighs heads against each other, and says how far the gated model is from the full one before and after.
#[cfg(feature = "burn")]
fn weigh_heads(
    settings: &EndToEnd,
    texts: &Windows<'_>,
    source: Arc<dyn WeightSource>,
    teacher: &Teacher<'_>,
    weights: &mut Weights,
) -> anyhow::Result<[f64; 2]> {
    use crate::train::end_to_end::{Differentiable, Window, tune};

    // Windows of all texts in turn, every other one to train on.
    let n_texts = texts.training.texts.len();
    let of_each = (2 * settings.windows).div_ceil(n_texts);
    let all = texts.take(settings.window, &vec![of_each; n_texts])?;
    let windows = all.into_iter().map(|ids| {
        let (_, tape) = teacher.read(&ids)?;
        let scores = tape.layers.iter().zip(&teacher.geometry.layers).enumerate();
        let scores = scores.map(|(i, (rows, g))| weights.of_tape(i, g, rows));
        Ok(Window {
            scores: scores.collect(),
            ids,
        })
    });
    let windows = windows.collect::<anyhow::Result<Vec<Window>>>()?;
    let every_other = |first| windows.iter().skip(first).step_by(2).cloned().collect();
    let [fit, judge]: [Vec<Window>; 2] = [every_other(0), every_other(1)];
    let model = Differentiable::load(source)?;
    let bar = bar(texts.args, settings.steps);
    let tuned = tune(&model, teacher.geometry, [&fit, &judge], settings, || {
        bar.inc(1)
    })?;
    bar.finish_and_clear();
    weights.shift(&tuned.shifts);
    Ok(tuned.divergence)
}

#[cfg(not(feature = "burn"))]
fn weigh_heads(
    _: &EndToEnd,
    _: &Windows<'_>,
    _: Arc<dyn WeightSource>,
    _: &Teacher<'_>,
    _: &mut Weights,
) -> anyhow::Result<[f64; 2]> {
    bail!("gate.end_to_end: kvlab was built without the feature `burn`")
}

/// What the weights come from.
fn origin(
    training: &Training,
    model_sha256: &str,
    divergence: Option<[f64; 2]>,
) -> BTreeMap<String, String> {
    let texts = training.texts.iter().zip(&training.windows);
    let texts: Vec<String> = texts
        .map(|(t, n)| format!("{} {}, {n} windows", t.name, t.sha256))
        .collect();
    let s = &training.settings;
    let target = match s.target {
        Target::Kvzip => "kvzip",
        Target::KvzipPlus => "kvzip_plus",
    };
    let kind = match s.mlp {
        None => "ridge".to_owned(),
        Some(m) => format!(
            "ridge and {} units, {} epochs, seed {}",
            m.hidden, m.epochs, m.seed
        ),
    };
    let heads = match (training.end_to_end, divergence) {
        (Some(e), Some([before, after])) => format!(
            "weighed end to end: {} steps, {} windows of {}, {} kept, KL {before:.4} to {after:.4}",
            e.steps, e.windows, e.window, e.kept_fraction
        ),
        _ => "as fitted".to_owned(),
    };
    [
        ("heads", heads),
        ("model_sha256", model_sha256.to_owned()),
        ("model", training.model.clone()),
        ("name", training.name.clone()),
        ("target", format!("ln {target}, cut to {:?}", s.clip)),
        ("kind", kind),
        ("texts", texts.join("; ")),
        (
            "windows",
            format!(
                "of {} tokens, one of {} held out",
                training.window, training.held_out
            ),
        ),
        ("ridges", format!("{:?}", s.ridges)),
        ("engine", env!("CARGO_PKG_VERSION").to_owned()),
    ]
    .map(|(k, v)| (k.to_owned(), v))
    .into()
}

fn report(
    training: &Training,
    fitting: &Fitting,
    (fitted, divergence): (&Fitted, Option<[f64; 2]>),
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let network = match training.settings.mlp {
        None => "",
        Some(_) => "     network: R²    rank",
    };
    writeln!(out, "layer   line: R²   rank   ridge{network}")?;
    let row = |line: Judged, ridge: &str, network: Option<Judged>| {
        let network = network.map(|n| format!("  {:>14.3}  {:>6.3}", n.r2, n.rank));
        let network = network.unwrap_or_default();
        format!("{:>9.3} {:>6.3}  {ridge:>6}{network}", line.r2, line.rank)
    };
    let fits: Vec<(usize, LayerFit)> = (0..)
        .zip(&fitted.layers)
        .filter_map(|(i, f)| Some((i, (*f)?)))
        .collect();
    for (i, fit) in &fits {
        let ridge = format!("{:.0e}", fit.ridge);
        writeln!(out, "{i:>5}  {}", row(fit.line, &ridge, fit.network))?;
    }
    let lines: Vec<Judged> = fits.iter().map(|(_, f)| f.line).collect();
    let networks: Vec<Judged> = fits.iter().filter_map(|(_, f)| f.network).collect();
    let networks = (!networks.is_empty()).then(|| Judged::mean(&networks));
    writeln!(out, " mean  {}", row(Judged::mean(&lines), "", networks))?;
    let [fit, held_out] = fitting.n_tokens;
    let bytes = fitted.weights.bytes();
    writeln!(
        out,
        "{fit} tokens fitted to, {held_out} held out, which chose the ridge: R² and the rank correlation within heads are of every {JUDGED}th\n\
         {bytes} bytes of weights, {:.1} a token of 2048, in {}",
        bytes as f64 / 2048.0,
        training.file.display()
    )?;
    if let Some([before, after]) = divergence {
        writeln!(
            out,
            "KL divergence on windows not trained on: {before:.4} with heads as fitted, {after:.4} weighed end to end"
        )?;
    }
    Ok(())
}

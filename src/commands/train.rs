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
use crate::cache::strategy::Strategy;
use crate::cache::{Admission, Geometry, KvCache, Materials, SeqId, StagedCache};
use crate::cli::TrainArgs;
use crate::compute::cpu::Cpu;
use crate::config::{Training, load_training};
use crate::data::Passages;
use crate::engine::repetition::{MAX_PROMPT, repetition};
use crate::engine::{CHUNK, Extras, Recording, RepeatPrompt, prefill};
use crate::model::geometry::geometry;
use crate::model::ops::Arithmetic;
use crate::model::source::{FetchProgress, ModelDir, Silent, resolve};
use crate::model::transformer::{LanguageModel, Transformer};
use crate::train::gate::{Fitted, Fitting, Use};

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
    let longest = 2 * training.window + MAX_PROMPT;
    if longest > spec.context_length {
        bail!(
            "data.window: a window of {} read twice needs {longest} positions, `{}` has {}: make it smaller",
            training.window,
            training.model,
            spec.context_length
        );
    }
    let geometry = geometry(&spec, longest);
    let windows = windows(&training, args, &loaded.tokenizer)?;
    let prompt = repeat_prompt(&loaded.tokenizer)?;
    let model = Transformer::<Cpu>::load_in(Arc::from(loaded.weights), Arithmetic::F32)?;
    let teacher = Teacher {
        model: &model,
        geometry: &geometry,
        prompt: &prompt,
    };
    let mut fitting = Fitting::new(&geometry, spec.n_embd, training.settings.clone());
    let bar = match args.quiet {
        true => indicatif::ProgressBar::hidden(),
        false => super::progress::items(windows.len()),
    };
    for window in &windows {
        teacher.teach(&mut fitting, window)?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    let fitted = fitting.finish().map_err(anyhow::Error::msg)?;
    let bytes = fitted
        .file(origin(&training, &loaded.sha256))
        .map_err(anyhow::Error::msg)?;
    if let Some(parent) = training.file.parent() {
        std::fs::create_dir_all(parent)
            .with_context(|| format!("creating {}", parent.display()))?;
    }
    write_atomic(&training.file, &bytes)?;
    report(&training, &fitting, &fitted, out)?;
    Ok(Exit::Ok)
}

/// All windows, every n-th of all held out.
fn windows(
    training: &Training,
    args: &TrainArgs,
    tokenizer: &crate::model::tokenizer::Tokenizer,
) -> anyhow::Result<Vec<Window>> {
    let places = lookup(&args.places);
    let mut windows = Vec::new();
    for text in &training.texts {
        let text = text.load(&places)?;
        let passages =
            text.passages(training.window, (training.windows, Passages::Spread), |t| {
                tokenizer.encode(t).map_err(anyhow::Error::from)
            })?;
        windows.extend(passages.into_iter().map(|p| Window {
            usage: Use::Fit,
            ids: p.ids,
        }));
    }
    for window in windows
        .iter_mut()
        .skip(training.held_out / 2)
        .step_by(training.held_out)
    {
        window.usage = Use::HeldOut;
    }
    Ok(windows)
}

/// What shows the gate what it should have kept.
struct Teacher<'a> {
    model: &'a dyn LanguageModel,
    geometry: &'a Geometry,
    prompt: &'a RepeatPrompt,
}

impl Teacher<'_> {
    fn teach(&self, fitting: &mut Fitting, window: &Window) -> anyhow::Result<()> {
        let (seq, other) = (SeqId(0), SeqId(1));
        let materials = Materials {
            geometry: self.geometry,
            calibration: None,
            backing_dir: None,
        };
        let mut cache = StagedCache::new(&Strategy::bare("f32"), materials)?;
        cache.admit(seq, Admission::Streaming)?;
        let extras = Extras {
            hidden: true,
            queries: 0,
        };
        let mut recording = Recording::with(cache, seq, extras);
        prefill(self.model, &mut recording, seq, &window.ids, CHUNK)?;
        let (mut cache, tape) = recording.into_parts();
        let seen = repetition(
            self.model,
            (&mut cache, seq, other),
            self.geometry,
            (&window.ids, &tape),
            self.prompt,
        )?;
        fitting.add(self.geometry, &tape, &seen, window.usage);
        Ok(())
    }
}

/// What the weights come from.
fn origin(training: &Training, model_sha256: &str) -> BTreeMap<String, String> {
    let texts = training.texts.iter();
    let texts: Vec<String> = texts.map(|t| format!("{} {}", t.name, t.sha256)).collect();
    let s = &training.settings;
    let target = format!("ln {:?}, cut to {:?}", s.target, s.clip).to_lowercase();
    [
        ("model_sha256", model_sha256.to_owned()),
        ("model", training.model.clone()),
        ("name", training.name.clone()),
        ("target", target),
        ("texts", texts.join("; ")),
        (
            "windows",
            format!(
                "{} of {} tokens of each text, one of {} held out",
                training.windows, training.window, training.held_out
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
    fitted: &Fitted,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    writeln!(
        out,
        "layer  held-out R²  rank correlation within heads  ridge"
    )?;
    for (i, fit) in fitted.layers.iter().enumerate() {
        writeln!(
            out,
            "{i:>5}  {:>11.3}  {:>29.3}  {:>5.0e}",
            fit.r2, fit.rank, fit.ridge
        )?;
    }
    let n = fitted.layers.len() as f64;
    let mean =
        |f: fn(&crate::train::gate::LayerFit) -> f64| fitted.layers.iter().map(f).sum::<f64>() / n;
    let [fit, held_out] = fitting.n_tokens;
    writeln!(
        out,
        "mean   {:>11.3}  {:>29.3}\n{fit} tokens fitted to, {held_out} held out; {} bytes of weights in {}",
        mean(|l| l.r2),
        mean(|l| l.rank),
        2 * fitted.weights.len(),
        training.file.display()
    )?;
    Ok(())
}

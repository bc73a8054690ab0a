//! `kvlab kld`: base logits written to llama.cpp's file, or read from one to judge strategies.
//!
//! Invariant: what can be refused is refused before the model runs; a file is complete or has another name.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use indicatif::ProgressBar;

use super::named::{Settings, experiment};
use super::progress::{self, Bar};
use super::session::{CALIBRATION_WINDOW, Learner};
use super::{Exit, limits, lookup};
use crate::cache::{Geometry, Materials};
use crate::cli::KldArgs;
use crate::compute::cpu::Cpu;
use crate::config::Plan;
use crate::data::Lookup;
use crate::eval::kld::{Evaluator, Header, LogitsReader, Statistics, check, cut};
use crate::model::geometry::geometry;
use crate::model::ops::Load;
use crate::model::source::{FetchProgress, ModelDir, Silent, resolve};
use crate::model::transformer::Transformer;
use crate::model::{self, LoadedModel};
use crate::report::kld::{Compared, Sheet, json, text};

/// Writes, or compares and prints.
///
/// # Errors
/// A name, a text or a file that can't be used, a strategy that breaks down, a failed write.
pub fn kld(args: &KldArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let plan = plan(args)?;
    let reader = match args.write {
        true => None,
        false => Some(LogitsReader::open(&args.base)?),
    };
    let fetching: &dyn FetchProgress = if args.quiet { &Silent } else { &Bar::default() };
    let models_dir = ModelDir::locate(args.places.models_dir.as_deref())?;
    let loaded = model::load(&resolve(&plan.model, &models_dir, fetching)?)?;
    let spec = loaded.spec.clone();
    let (header, ids) = match &reader {
        Some(reader) => (reader.header(), Vec::new()),
        None => tokens(args, &plan, &loaded)?,
    };
    check(header, spec.n_vocab, spec.context_length)?;
    if args.write && plan.strategies.len() != 1 {
        bail!(
            "--write takes the logits of one strategy, {} are named",
            plan.strategies.len()
        );
    }
    let longest = header.n_ctx.max(CALIBRATION_WINDOW);
    let geometry = geometry(&spec, longest.min(spec.context_length));
    plan.check_as_read(&limits(&plan, &loaded, &geometry))?;
    let most = args.chunks.map_or(usize::MAX, usize::from);
    let bar = match args.quiet {
        true => ProgressBar::hidden(),
        false => progress::items(header.n_chunks.min(most) * plan.strategies.len()),
    };
    let work = Work {
        plan: &plan,
        places: &lookup(&args.places),
        geometry: &geometry,
        bar: &bar,
    };
    let threads = rayon::ThreadPoolBuilder::new().num_threads(args.threads.unwrap_or(0).into());
    let threads = threads.build().context("threads")?;
    let Some(reader) = reader else {
        let ppl = threads.install(|| work.write(loaded, (&args.base, header), &ids))?;
        bar.finish_and_clear();
        return wrote(args, &plan.strategies[0].label, (header, ppl), out);
    };
    let rows = threads.install(|| work.compare(loaded, reader, most))?;
    bar.finish_and_clear();
    let sheet = Sheet {
        base: args.base.display().to_string(),
        model: plan.model.clone(),
        header,
        n_chunks: header.n_chunks.min(most),
        with_bos: spec.add_bos && spec.bos_id.is_some(),
        rows,
    };
    match args.json {
        true => writeln!(out, "{}", serde_json::to_string_pretty(&json(&sheet))?)?,
        false => out.write_all(text(&sheet).as_bytes())?,
    }
    Ok(Exit::Ok)
}

/// What the model's run needs besides the model.
struct Work<'a> {
    plan: &'a Plan,
    places: &'a Lookup,
    geometry: &'a Geometry,
    bar: &'a ProgressBar,
}

impl Work<'_> {
    /// Writes the file; gives the perplexity.
    fn write(
        &self,
        loaded: LoadedModel,
        file: (&Path, Header),
        ids: &[u32],
    ) -> anyhow::Result<f64> {
        self.with(loaded, |evaluator| {
            let strategy = &self.plan.strategies[0];
            Ok(evaluator.write(strategy, file, ids, &mut || self.bar.inc(1))?)
        })
    }

    /// Compares every strategy with the file.
    fn compare(
        &self,
        loaded: LoadedModel,
        mut reader: LogitsReader,
        most: usize,
    ) -> anyhow::Result<Vec<Compared>> {
        self.with(loaded, |evaluator| {
            let strategies = &self.plan.strategies;
            let mut done = || self.bar.inc(1);
            let pairs = evaluator.compare(strategies, &mut reader, most, &mut done)?;
            let rows = strategies.iter().zip(&pairs).map(|(strategy, pairs)| {
                Ok(Compared {
                    label: strategy.label.clone(),
                    statistics: Statistics::of(pairs).context("no token was scored")?,
                })
            });
            rows.collect()
        })
    }

    /// Loads the model, calibrates if a strategy learns, and does something with both.
    fn with<T>(
        &self,
        loaded: LoadedModel,
        act: impl FnOnce(Evaluator<'_>) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let cpu = Cpu::load(Arc::from(loaded.weights), self.plan.arithmetic)?;
        let model = Transformer::over(cpu);
        let learner = Learner {
            model: &model,
            tokenizer: &loaded.tokenizer,
            geometry: self.geometry,
        };
        let calibration = learner.calibrate(self.plan, self.places, &Silent)?;
        act(Evaluator {
            model: &model,
            materials: Materials {
                geometry: self.geometry,
                calibration: calibration.as_ref(),
                backing_dir: None,
            },
        })
    }
}

fn plan(args: &KldArgs) -> anyhow::Result<Plan> {
    let exact = ["f32".to_owned()];
    let names = match (args.strategies.is_empty(), args.write) {
        (true, true) => &exact[..],
        (true, false) => bail!("no strategy is named: give one or more with -s, or --write"),
        _ => &args.strategies,
    };
    let settings = Settings {
        model: &args.model,
        text: &args.file,
        arithmetic: &args.arithmetic,
    };
    experiment(names, &settings)
}

/// The text's tokens as llama-perplexity makes them, and how they are cut.
fn tokens(args: &KldArgs, plan: &Plan, loaded: &LoadedModel) -> anyhow::Result<(Header, Vec<u32>)> {
    let text = plan.data[0].load(&lookup(&args.places))?;
    // llama.cpp drops one newline at the end of a file that it is given.
    let body = text.text.strip_suffix('\n').unwrap_or(&text.text);
    let bos = loaded.spec.bos_id.filter(|_| loaded.spec.add_bos);
    let mut ids: Vec<u32> = bos.into_iter().collect();
    ids.extend(loaded.tokenizer.encode(body)?);
    let n_ctx = usize::from(args.ctx_size);
    let most = args.chunks.map(usize::from);
    let header = cut(ids.len(), n_ctx, loaded.spec.n_vocab, most)?;
    Ok((header, ids))
}

fn wrote(
    args: &KldArgs,
    label: &str,
    (header, ppl): (Header, f64),
    out: &mut dyn Write,
) -> anyhow::Result<Exit> {
    let path: &Path = &args.base;
    let name = path.display();
    if args.json {
        let record = serde_json::json!({
            "base": name.to_string(),
            "strategy": label,
            "n_ctx": header.n_ctx,
            "n_chunks": header.n_chunks,
            "n_tokens": header.n_chunks * header.n_scored(),
            "ppl": ppl,
            "bytes": header.file_bytes(),
        });
        writeln!(out, "{record}")?;
    } else {
        writeln!(
            out,
            "{name}: logits of {label}, {} chunks of {} tokens, {} scored, {} bytes; PPL = {ppl:.4}",
            header.n_chunks,
            header.n_ctx,
            header.n_chunks * header.n_scored(),
            header.file_bytes(),
        )?;
    }
    Ok(Exit::Ok)
}

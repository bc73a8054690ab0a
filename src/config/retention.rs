//! What a strategy's retention asks for, held against the protocols and the model that it would run with.

use super::plan::{ModelLimits, Plan, is_calibrated};
use super::problems::Problems;
use super::protocol::Protocol;
use crate::cache::stage::{BuildContext, Codec, HeadContext, Kind, Retention, Side, Stage, find};
use crate::cache::strategy::{StageSpec, Strategy};
use crate::cache::{Continuation, Materials, least_retained};
use crate::engine::repetition;
use std::sync::Arc;

impl Plan {
    /// Refuses a retention that the protocols can't supply, that has nothing to choose, or that was learned for another
    /// model.
    pub(super) fn check_retention(
        &self,
        index: usize,
        strategy: &Strategy,
        model: &ModelLimits<'_>,
        problems: &mut Problems,
    ) {
        let Some(retain) = built(strategy, model) else {
            return;
        };
        self.check_origin((index, strategy), retain.as_ref(), model, problems);
        let key = format!("strategy.{index}.retain");
        let mut refuse = |what: String, hint: &str| {
            let what = format!("{}: {what}", strategy.label);
            problems.push(self.problem(&key, "retain", what, Some(hint)));
        };
        if let Some(why) = retain
            .chooses_levels()
            .then(|| no_levels(strategy, model))
            .flatten()
        {
            refuse(
                why,
                "write preset = \"int4-best\", or encode = \"int4\" (int2, int8): asymmetric, fit = \"minmax\", not packed",
            );
        }
        for (why, hint) in idle_rebuild((strategy, retain.as_ref()), model, &self.protocols) {
            refuse(why, hint);
        }
        for protocol in &self.protocols {
            if let Protocol::Stream { .. } = protocol
                && let Some(why) = retain.needs_point()
            {
                let what = format!("{why}, and `stream` has no compression point");
                refuse(what, "use kind = \"compress-once\" in [protocol]");
            }
            if retain.budgets_decoding() && protocol.continuation() == Continuation::Exact {
                refuse(
                    "`decoding_…` budgets rows that come after the compression point, and with continuation = \"exact\" these all stay".to_owned(),
                    "write continuation = \"strategy\", or leave `decoding_…` out",
                );
            }
            let longer = match protocol {
                Protocol::Stream { .. } => "window",
                _ => "context",
            };
            if let Some(n) = seen_at_once(protocol)
                && let Some(why) = retain.nothing_to_choose(n as u32)
            {
                let hint = format!("protect fewer rows, keep more, or take a longer {longer}");
                refuse(why, &hint);
            }
            if let Protocol::CompressOnce { context, .. }
            | Protocol::Generate { context, .. }
            | Protocol::Tasks {
                length: context, ..
            } = protocol
                && let Some(why) =
                    shortage(strategy, model, (*context as u32, protocol.continuation()))
            {
                refuse(why, "raise it, or protect fewer rows");
            }
            let context = match protocol {
                Protocol::CompressOnce { context, .. } | Protocol::Generate { context, .. } => {
                    *context
                }
                _ => protocol.n_tokens(),
            };
            let read_again = context + context.min(repetition::PART) + repetition::MAX_PROMPT;
            if retain.needs().context.repetition && read_again > model.context_length {
                let what = format!(
                    "a context of {context}, read a second time behind itself, needs {read_again} positions, `{}` has {}",
                    model.name, model.context_length
                );
                refuse(what, "take a shorter context");
            }
        }
    }
}

impl Plan {
    /// Refuses retentions that were learned for another model, or that only a compression point lets act: for commands
    /// that have none, and no protocol.
    ///
    /// # Errors
    /// All of them, each with its place.
    pub fn check_as_read(&self, model: &ModelLimits<'_>) -> Result<(), Problems> {
        let mut problems = Problems::default();
        for (i, strategy) in self.strategies.iter().enumerate() {
            let Some(retain) = built(strategy, model) else {
                continue;
            };
            self.check_origin((i, strategy), retain.as_ref(), model, &mut problems);
            if let Some(why) = retain.needs_point() {
                let what = format!(
                    "{}: {why}, and this command has no compression point: something else would be measured",
                    strategy.label
                );
                let hint = "kvlab run with kind = \"compress-once\" has one; `threshold`, or allocate = \"uniform\" without \
                            `segments`, acts without where a score is known when its row comes";
                let key = format!("strategy.{i}.retain");
                problems.push(self.problem(&key, "retain", what, Some(hint)));
            }
        }
        problems.into_result(())
    }

    fn check_origin(
        &self,
        (index, strategy): (usize, &Strategy),
        retain: &dyn Retention,
        model: &ModelLimits<'_>,
        problems: &mut Problems,
    ) {
        let Some(sha256) = retain.made_for().filter(|&m| m != model.sha256) else {
            return;
        };
        let what = format!(
            "{}: it was trained for the model of sha256 {sha256:.12}, `{}` is {:.12}",
            strategy.label, model.name, model.sha256
        );
        let hint = "train one for this model: kvlab train";
        let key = format!("strategy.{index}.retain");
        problems.push(self.problem(&key, "retain", what, Some(hint)));
    }
}

/// Tokens that a retention has seen when it must have met its budget; of tasks, each item's own number.
fn seen_at_once(protocol: &Protocol) -> Option<usize> {
    match protocol {
        Protocol::CompressOnce { context, .. } | Protocol::Generate { context, .. } => {
            Some(*context)
        }
        Protocol::Stream { window, .. } => Some(*window),
        Protocol::Tasks { .. } => None,
    }
}

/// What a byte budget lacks for the rows of a context that always live. A codebook's bytes are known once it is learned; the
/// run says then what it needs.
fn shortage(
    strategy: &Strategy,
    model: &ModelLimits<'_>,
    (context, continuation): (u32, Continuation),
) -> Option<String> {
    if is_calibrated(strategy) {
        return None;
    }
    let materials = Materials {
        geometry: model.geometry,
        calibration: None,
        backing_dir: None,
    };
    // What can't be built is told already.
    let short = least_retained(strategy, materials, (context, continuation)).ok()??;
    Some(format!(
        "a budget of {} bytes can't hold the rows of a context of {context} that always live: they take {}",
        short.budget_bytes, short.needed_bytes
    ))
}

/// Why rows of one page could not have the bits that retention chooses for them.
fn no_levels(strategy: &Strategy, model: &ModelLimits<'_>) -> Option<String> {
    for (codec, spec) in codecs(strategy, model) {
        if codec.is_none_or(|codec| codec.leveled().is_none()) {
            return Some(format!(
                "it chooses bits row by row, and rows of `encode` = \"{}\" all have the same",
                spec.name
            ));
        }
    }
    if let Some(pack) = &strategy.pack {
        return Some(format!(
            "pages of rows of different bits are not packed, and `pack` is \"{}\"",
            pack.name
        ));
    }
    None
}

/// Why pages would not be coded anew where `rebuild` asks for it, or nobody would be told; and what to do.
fn idle_rebuild(
    (strategy, retain): (&Strategy, &dyn Retention),
    model: &ModelLimits<'_>,
    protocols: &[Protocol],
) -> Vec<(String, &'static str)> {
    let mut problems = Vec::new();
    if retain.rebuild().is_none() {
        return problems;
    }
    if !has_pages(strategy, model) {
        let what = format!(
            "`rebuild` codes pages of rows anew, and rows of `encode` = \"{}\" are coded one by one: they leave as they are",
            strategy.encode_k.name
        );
        problems.push((what, "leave `rebuild` out, or take a format by channel"));
    }
    for protocol in protocols {
        if protocol.continuation() == Continuation::Exact {
            problems.push((
                "`rebuild` codes pages anew as rows leave, and with continuation = \"exact\" none leaves after the compression point".to_owned(),
                "write continuation = \"strategy\", or leave `rebuild` out",
            ));
        } else if matches!(protocol, Protocol::Generate { .. } | Protocol::Tasks { .. }) {
            problems.push((
                "`rebuild` is counted where a sequence is scored to its end, in compress-once and stream: here its error would not be told".to_owned(),
                "leave `rebuild` out",
            ));
        }
    }
    problems
}

/// Whether rows of a side are coded together, or may be: a format that learns is not built here.
fn has_pages(strategy: &Strategy, model: &ModelLimits<'_>) -> bool {
    let mut codecs = codecs(strategy, model).into_iter();
    codecs.any(|(codec, _)| codec.is_none_or(|codec| matches!(codec, Codec::Pages(_))))
}

/// The formats of K and V; `None` for one that learns from a calibration.
fn codecs<'a>(
    strategy: &'a Strategy,
    model: &ModelLimits<'_>,
) -> [(Option<Codec>, &'a StageSpec); 2] {
    let dim = model.geometry.layers.first().map_or(64, |l| l.head_dim);
    [(Side::K, &strategy.encode_k), (Side::V, &strategy.encode_v)].map(|(side, spec)| {
        let context = BuildContext {
            side,
            head: Some(HeadContext::any(dim)),
            ..context(strategy, model)
        };
        let stage = find(Kind::Encode, &spec.name)
            .ok()
            .filter(|def| !(def.calibrated)(&spec.params))
            .and_then(|def| (def.build)(&spec.params, &context).ok());
        match stage {
            Some(Stage::Encode(codec)) => (Some(codec), spec),
            _ => (None, spec),
        }
    })
}

fn context<'a>(strategy: &Strategy, model: &ModelLimits<'a>) -> BuildContext<'a> {
    BuildContext {
        geometry: model.geometry,
        keys: strategy.keys,
        side: Side::K,
        calibration: None,
        backing_dir: None,
        head: None,
    }
}

fn built(strategy: &Strategy, model: &ModelLimits<'_>) -> Option<Arc<dyn Retention>> {
    let spec = strategy.retain.as_ref()?;
    let context = context(strategy, model);
    // What can't be built is told already.
    let def = find(Kind::Retain, &spec.name).ok()?;
    match (def.build)(&spec.params, &context).ok()? {
        Stage::Retain(retain) => Some(retain),
        _ => None,
    }
}

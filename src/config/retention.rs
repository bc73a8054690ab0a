//! What a strategy's retention asks for, held against the protocols and the model that it would run with.

use super::plan::{ModelLimits, Plan};
use super::problems::Problems;
use super::protocol::Protocol;
use crate::cache::stage::{BuildContext, Kind, Retention, Side, Stage, find};
use crate::cache::strategy::Strategy;
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
        let key = format!("strategy.{index}.retain");
        let mut refuse = |what: String, hint: &str| {
            let what = format!("{}: {what}", strategy.label);
            problems.push(self.problem(&key, "retain", what, Some(hint)));
        };
        if let Some(sha256) = retain.made_for().filter(|&m| m != model.sha256) {
            let what = format!(
                "it was trained for the model of sha256 {sha256:.12}, `{}` is {:.12}",
                model.name, model.sha256
            );
            refuse(what, "train one for this model: kvlab train");
        }
        for protocol in &self.protocols {
            match protocol {
                Protocol::Stream { .. } => {
                    if let Some(why) = retain.needs_point() {
                        let what = format!("{why}, and `stream` has no compression point");
                        refuse(what, "use kind = \"compress-once\" in [protocol]");
                    }
                }
                Protocol::CompressOnce { context, .. } | Protocol::Generate { context, .. } => {
                    if let Some(why) = retain.nothing_to_choose(*context as u32) {
                        refuse(
                            why,
                            "protect fewer rows, keep more, or take a longer context",
                        );
                    }
                }
                Protocol::Tasks { .. } => {}
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

fn built(strategy: &Strategy, model: &ModelLimits<'_>) -> Option<Arc<dyn Retention>> {
    let spec = strategy.retain.as_ref()?;
    let context = BuildContext {
        geometry: model.geometry,
        keys: strategy.keys,
        side: Side::K,
        calibration: None,
        backing_dir: None,
        head: None,
    };
    // What can't be built is told already.
    let def = find(Kind::Retain, &spec.name).ok()?;
    match (def.build)(&spec.params, &context).ok()? {
        Stage::Retain(retain) => Some(retain),
        _ => None,
    }
}

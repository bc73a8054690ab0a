//! `kvlab check`: everything that is wrong with an experiment, at once.

use std::io::Write;

use super::items::Source;
use super::{Exit, cells_of, checked_model, load_plan, lookup};
use crate::cli::CheckArgs;
use crate::data::{Lookup, Network};

/// Reads the experiment and says what is wrong, or what it would run.
///
/// # Errors
/// The experiment's problems, or a failed write.
pub fn check(args: &CheckArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let plan = load_plan(&args.experiment)?;
    let model = checked_model(&plan, &args.places, 1)?;
    let here = Lookup {
        network: Network::Offline,
        ..lookup(&args.places)
    };
    let file = args.experiment.file.display();
    writeln!(out, "{file}: sound; {}", cells_of(&plan))?;
    let calibration = plan.calibration.iter().map(|c| &c.data);
    for text in plan.data.iter().chain(calibration) {
        if let Err(e) = Source::load(text, &here) {
            writeln!(out, "note: {e}")?;
        }
    }
    if model.is_none() {
        let name = &plan.model;
        writeln!(
            out,
            "note: model `{name}` is not on this machine yet: its lengths and heads are unchecked; run fetches it"
        )?;
    }
    Ok(Exit::Ok)
}

//! The command line: definitions only. What a command does stands in `commands`.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

const EXAMPLES: &str = "\
First steps:
  kvlab run   experiments/quickstart.toml      a real model, seven caches, one table
  kvlab list                                   what there is: stages, presets, protocols, texts, models
  kvlab check experiments/quickstart.toml      is the experiment sound?
  kvlab plan  experiments/quickstart.toml      what it would run, and the bytes of each strategy
  kvlab report results/NAME/RUN-ID             the tables of a run, made again

Exit codes: 0 ok, 1 a comparison says regression, 2 refused before work, 3 some cells failed,
4 a bundle does not verify, 130 interrupted (run again to go on).";

/// What a method of KV-cache compression really costs and gives, measured on the cache that is stored.
#[derive(Debug, Parser)]
#[command(name = "kvlab", version, after_help = EXAMPLES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run an experiment, or go on with it, and print its table.
    Run(RunArgs),
    /// Make and print the tables of a run again, from its records.
    Report(ReportArgs),
    /// Say everything that is wrong with an experiment, and run nothing.
    Check(CheckArgs),
    /// Show what an experiment would run: its cells, and the bytes of each strategy at its context.
    Plan(PlanArgs),
    /// List the names that experiments may use, with a line each.
    List(ListArgs),
    /// Fetch models and texts by name ahead of a run.
    Fetch(FetchArgs),
}

/// An experiment and the changes to it.
#[derive(Debug, Args)]
pub struct Experiment {
    /// The experiment's TOML file.
    pub file: PathBuf,
    /// Change one setting; may be repeated. The value is TOML, a list is a sweep:
    /// -s protocol.context=2048 -s 'strategy.0.tail=[0, 32]'
    #[arg(short = 's', long = "set", value_name = "KEY.PATH=VALUE")]
    pub overrides: Vec<String>,
}

/// Where models and texts are looked for.
#[derive(Debug, Clone, Default, Args)]
pub struct Places {
    /// Folder of models [default: KVLAB_HOME/models, else the user's cache folder]
    #[arg(long, value_name = "DIR")]
    pub models_dir: Option<PathBuf>,
    /// Folder of texts, looked into before the hub [default: KVLAB_DATA]
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
}

/// `kvlab run`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kvlab run experiments/quickstart.toml
  kvlab run experiments/wikitext2.toml -s protocol.windows=2 --data-dir data
A run that was stopped goes on where it was when the same command is given again.")]
pub struct RunArgs {
    /// What to run.
    #[command(flatten)]
    pub experiment: Experiment,
    /// Where to look.
    #[command(flatten)]
    pub places: Places,
    /// Folder of results; the run's own folder is DIR/NAME/RUN-ID
    #[arg(long, value_name = "DIR", default_value = "results")]
    pub results_dir: PathBuf,
    /// Threads; never changes a number [default: the experiment's, else all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Begin another bundle even if this experiment has one
    #[arg(long)]
    pub fresh: bool,
    /// Print the table as JSON
    #[arg(long)]
    pub json: bool,
    /// No progress, only the table
    #[arg(long, short)]
    pub quiet: bool,
}

/// `kvlab report`.
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  kvlab report results/quickstart/7f7fef64
Exit code 1 when the run misses a bar of its experiment, 3 when some of its cells failed.")]
pub struct ReportArgs {
    /// The run's folder
    pub bundle: PathBuf,
    /// Print the table as JSON
    #[arg(long)]
    pub json: bool,
}

/// `kvlab check`.
#[derive(Debug, Args)]
#[command(after_help = "\
Every problem is told at once, with file, line, column and what to write instead; exit code 2.
A model that is on this machine is looked at too: lengths, heads, ranks.")]
pub struct CheckArgs {
    /// What to check.
    #[command(flatten)]
    pub experiment: Experiment,
    /// Where to look.
    #[command(flatten)]
    pub places: Places,
}

/// `kvlab plan`.
#[derive(Debug, Args)]
#[command(after_help = "\
The bytes are those of real caches, filled with random rows for the model's layers: what packing gains on
real text, and the numbers of quality, only `run` can tell.
Examples:
  kvlab plan experiments/quickstart.toml
  kvlab plan experiments/quickstart.toml --context 32768 --json")]
pub struct PlanArgs {
    /// What to plan.
    #[command(flatten)]
    pub experiment: Experiment,
    /// Where to look.
    #[command(flatten)]
    pub places: Places,
    /// Tokens at which bytes are given [default: the protocol's]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub context: Option<u32>,
    /// Print the resolved plan, its cells and bytes as JSON
    #[arg(long)]
    pub json: bool,
}

/// `kvlab fetch`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kvlab fetch smollm2-135m-instruct
  kvlab fetch wikitext2-test hub:HuggingFaceTB/SmolLM2-135M
Every file is checked against its sha256 and only then put in place.")]
pub struct FetchArgs {
    /// Names of models (built in, or hub:org/name) and texts
    #[arg(required = true, value_name = "NAME")]
    pub names: Vec<String>,
    /// Where to put and to look.
    #[command(flatten)]
    pub places: Places,
    /// No progress
    #[arg(long, short)]
    pub quiet: bool,
}

/// `kvlab list`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kvlab list encode        the formats of rows, with their parameters
  kvlab list presets       named strategies and the lines they stand for
  kvlab list --json")]
pub struct ListArgs {
    /// Only this kind
    pub kind: Option<Listed>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// What can be listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Listed {
    /// Which rows live.
    Retain,
    /// Linear maps of rows.
    Project,
    /// Rows to bytes.
    Encode,
    /// Bytes to fewer bytes, exactly.
    Pack,
    /// Where pages live.
    Place,
    /// Named strategies.
    Presets,
    /// How a cache is judged.
    Protocols,
    /// Texts by name.
    Texts,
    /// Built-in models.
    Models,
}

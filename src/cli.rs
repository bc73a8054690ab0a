//! The command line: definitions only. What a command does stands in `commands`.

mod counts;
mod size;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

pub use counts::Counts;
pub use size::ByteSize;

const EXAMPLES: &str = "\
First steps:
  kvlab run   experiments/quickstart.toml      a real model, seven caches, one table
  kvlab list                                   what there is: stages, presets, protocols, texts, models
  kvlab check experiments/quickstart.toml      is the experiment sound?
  kvlab plan  experiments/quickstart.toml      what it would run, and the bytes of each strategy
  kvlab plan  --model config.json --budget 24GiB   which caches of a model fit, and how many sequences
  kvlab report results/NAME/RUN-ID             the tables of a run, made again
  kvlab bench -s f16,q8_0,q4_0 -d 0,4096       tokens per second of prefill and decode, by cache

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
    /// Show what an experiment would run, or which caches of a model fit into a memory.
    Plan(PlanArgs),
    /// List the names that experiments may use, with a line each.
    List(ListArgs),
    /// Fetch models and texts by name ahead of a run.
    Fetch(FetchArgs),
    /// Measure the speed of prefill and decode, strategies beside each other.
    Bench(BenchArgs),
    /// Write base logits to llama.cpp's file, or judge strategies by one: perplexity and KL divergence.
    Kld(KldArgs),
    /// Fit what a strategy learns, and write its weights: a gate that says which rows will be needed.
    Train(TrainArgs),
    /// Hold a strategy, or a new stage, against the conformance suite.
    CheckStrategy(CheckStrategyArgs),
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
Examples:
  kvlab report results/quickstart/e57f6e25
  kvlab report results/tasks/1c0ffee1 --lm-eval out/MODEL/results_DATE.json
  kvlab report --lm-eval results_A.json --lm-eval results_B.json
Exit code 1 when the run misses a bar of its experiment, 3 when some of its cells failed.")]
pub struct ReportArgs {
    /// The run's folder
    #[arg(required_unless_present = "lm_eval")]
    pub bundle: Option<PathBuf>,
    /// A results file of lm-evaluation-harness, as a table after the run's; may be repeated
    #[arg(long, value_name = "FILE")]
    pub lm_eval: Vec<PathBuf>,
    /// Print the table as JSON; with --lm-eval a list of rows as a document of its own
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

With --model and no experiment: each strategy's cache at --context tokens x --batch sequences, whether it fits beside the
weights into --budget, how many sequences do, the longest context, and the length at which the cache is as large as the
weights. The model's config.json is enough: Llama, Mistral, Mixtral, Qwen 2 and 3, Gemma 1 to 3, Phi, DeepSeek V2 and V3.
Examples:
  kvlab plan experiments/quickstart.toml
  kvlab plan experiments/quickstart.toml --context 32768 --json
  kvlab plan --model smollm2-135m-instruct --context 8192 --batch 16 --budget 2GiB
  kvlab plan --model llama-3-8b/config.json --context 131072 --budget 24GiB --weights q4_0 -s f16,q8_0,int4-best")]
pub struct PlanArgs {
    /// The experiment's TOML file
    #[arg(value_name = "EXPERIMENT", required_unless_present = "model")]
    pub experiment: Option<PathBuf>,
    /// With an experiment: change one of its settings, as in `kvlab run`. With --model: the strategies, as in `kvlab bench`
    /// [default: all presets and bare formats]
    #[arg(
        short = 's',
        long = "set",
        visible_alias = "strategy",
        value_name = "KEY=VALUE|NAME"
    )]
    pub chosen: Vec<String>,
    /// Plan for this model: a built-in name, hub:org/name, a .gguf file, a Hugging Face folder, or a config.json alone
    #[arg(short, long, value_name = "NAME|PATH", conflicts_with = "experiment")]
    pub model: Option<String>,
    /// Tokens at which bytes are given [default: the protocol's; the model's longest]
    #[arg(short, long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    pub context: Option<u32>,
    /// Sequences in the cache
    #[arg(short, long, value_name = "N", default_value_t = 1, conflicts_with = "experiment", value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub batch: u32,
    /// Memory for weights and cache: 24GiB, 24GB, 500MB
    #[arg(long, value_name = "SIZE", conflicts_with = "experiment")]
    pub budget: Option<ByteSize>,
    /// The weights' size, or their format: f32, f16, bf16, fp8, int8, q8_0, q4_0 [default: the file's, else config.json's]
    #[arg(long, value_name = "SIZE|FORMAT", conflicts_with = "experiment")]
    pub weights: Option<String>,
    /// Where to look.
    #[command(flatten)]
    pub places: Places,
    /// Print the plan as JSON
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

/// `kvlab train`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kvlab train experiments/artifacts/gate-smollm2-135m-instruct.toml
  kvlab train gate.toml -s data.windows=4 -s 'file=\"/tmp/gate.safetensors\"'")]
pub struct TrainArgs {
    /// The training's TOML file
    pub file: PathBuf,
    /// Change one setting; may be repeated: -s data.windows=4
    #[arg(long, short = 's', value_name = "KEY.PATH=VALUE")]
    pub set: Vec<String>,
    /// Where to look.
    #[command(flatten)]
    pub places: Places,
    /// Threads; never changes a number [default: all]
    #[arg(long, value_name = "N")]
    pub threads: Option<u16>,
    /// No progress
    #[arg(long, short)]
    pub quiet: bool,
}

/// `kvlab bench`.
#[derive(Debug, Args)]
#[command(after_help = "\
Tests and options are llama-bench's: pp512 is the prefill of 512 tokens, tg128 the decoding of 128, `@ d4096` with 4096
tokens in the cache before. Numbers may be lists and ranges: 0,2048,4096 or 1024-4096+1024 or 1-8*2; every
combination is run. t/s: mean ± sample deviation over the repetitions.

In each repetition all strategies run in turn, so that a busy moment of the machine hits each of them: compare rows of one
table. On a shared machine t/CPU s tells more than t/s. ppl2048 is a test of ours (--n-score): 2048 tokens as a perplexity
takes them, with logits of each.
  MiB/step, GB/s   weights and cache that one decode step reads, and how fast; `machine:` is the rate of a plain read
  linear %         of the wall time: the layers' linear products; head: the logits; attention: over the stored
                   cache; encoding: storing rows, eviction, sealing; rest: norms, activations, residuals
  max |Δlogit|     against a cache of f32 rows, over a text of 192 tokens; KLD in nats
The second table has latency in ms. tg: n tokens of all runs, the mean is the time per output token (TPOT), percentiles are those of
the time from token to token (ITL). pp: n runs, each the time to the first token (TTFT), split into prefill, scoring (what
retention decides) and compression (storing rows). Outliers lie more than 3.5 modified z-scores from the median, and stay in all numbers.
time vs: each run over the first strategy's of the same repetition, with a 95 % interval; the order turns around with each repetition.
--no-cache decodes with no cache beside it, all tokens through the model again for each one. --isolate gives each strategy
and depth a process of its own and tells what it holds.
Before the times each strategy decodes that text token by token and in chunks: unless the logits are equal to the bit,
its rows are marked FAILED and the exit code is 1.

Examples:
  kvlab bench                                          pp512 and tg128 with an f16 cache
  kvlab bench -s f16,q8_0,q4_0 -d 0,2048,7500 -t 1,2
  kvlab bench -p 0 -n 32 --no-cache 2 -d 100,2000,4000 -r 3 --isolate
  kvlab bench -p 0 -n 64 -s int4-best -s 'encode = \"q4_0\", tail = 32' -r 3 -o json")]
pub struct BenchArgs {
    /// Built-in name, hub:org/name, .gguf file or Hugging Face folder
    #[arg(
        short,
        long,
        value_name = "NAME|PATH",
        default_value = "smollm2-135m-instruct"
    )]
    pub model: String,
    /// Preset, format (K/V where they differ), or the keys of a strategy table; may be repeated
    #[arg(short, long = "strategy", value_name = "NAME", default_value = "f16")]
    pub strategies: Vec<String>,
    /// Tokens to prefill; 0: no such test
    #[arg(
        short = 'p',
        long,
        value_name = "N",
        default_value = "512",
        value_delimiter = ','
    )]
    pub n_prompt: Vec<Counts>,
    /// Tokens to decode; 0: no such test
    #[arg(
        short,
        long,
        value_name = "N",
        default_value = "128",
        value_delimiter = ','
    )]
    pub n_gen: Vec<Counts>,
    /// Tokens to score: prefill with the logits and likelihood of each, what a perplexity costs
    #[arg(long, value_name = "N", default_value = "0", value_delimiter = ',')]
    pub n_score: Vec<Counts>,
    /// Tokens to decode without a cache: each recomputes all before it, which is slow; 0: no such test
    #[arg(long, value_name = "N", default_value = "0", value_delimiter = ',')]
    pub no_cache: Vec<Counts>,
    /// Tokens in the cache before
    #[arg(
        short = 'd',
        long,
        value_name = "N",
        default_value = "0",
        value_delimiter = ','
    )]
    pub n_depth: Vec<Counts>,
    /// Threads [default: all]
    #[arg(short, long, value_name = "N", value_delimiter = ',')]
    pub threads: Vec<Counts>,
    /// What linear layers over q4_0, q4_1 and q8_0 weights compute in: f32, int16 or int8
    #[arg(long, value_name = "NAME", default_value = "f32")]
    pub arithmetic: String,
    /// Runs of each test that count
    #[arg(short, long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub repetitions: u16,
    /// Also run each strategy and depth in a process of its own, one after another, for its memory
    #[arg(long)]
    pub isolate: bool,
    /// A strategy as JSON: measure the memory of this process with its cache alone, and nothing else
    #[arg(long, hide = true, value_name = "JSON", conflicts_with = "isolate")]
    pub cell: Option<String>,
    /// Text to feed: a name of `kvlab list texts`, or a file
    #[arg(
        short = 'f',
        long,
        value_name = "TEXT",
        default_value = "quickstart-prose"
    )]
    pub text: String,
    /// Form of the result
    #[arg(short, long, value_name = "FORM", default_value = "md")]
    pub output: BenchForm,
    /// Where to look.
    #[command(flatten)]
    pub places: Places,
    /// No progress, only the result
    #[arg(long, short)]
    pub quiet: bool,
}

/// `kvlab kld`.
#[derive(Debug, Args)]
#[command(after_help = "\
The file is llama.cpp's (`llama-perplexity --save-all-logits FILE` writes it, `--kl-divergence --kl-divergence-base FILE` reads it),
and so are the conventions: chunks of -c tokens, each on its own, a BOS token in the place of a chunk's first token where the
model wants one, the second half scored; the statistics are printed in its words and digits. 98 KB per scored token for a
vocabulary of 49,152.

Examples:
  kvlab kld --write --base base.kld -f wikitext2-test -c 512 --chunks 8     the reference: f32 rows
  kvlab kld --base base.kld -s f16,q8_0,q4_0 -s int4-best                  our caches against it
  llama-perplexity -m MODEL.gguf -c 512 -ctk q4_0 -ctv q4_0 -fa on --kl-divergence --kl-divergence-base base.kld")]
pub struct KldArgs {
    /// The file of base logits
    #[arg(long, visible_alias = "kl-divergence-base", value_name = "FILE")]
    pub base: PathBuf,
    /// Write the file from a strategy's logits [default strategy: f32]
    #[arg(long, visible_alias = "save-all-logits")]
    pub write: bool,
    /// Built-in name, hub:org/name, .gguf file or Hugging Face folder
    #[arg(
        short,
        long,
        value_name = "NAME|PATH",
        default_value = "smollm2-135m-instruct"
    )]
    pub model: String,
    /// Preset, format (K/V where they differ), or the keys of a strategy table; may be repeated
    #[arg(short, long = "strategy", value_name = "NAME")]
    pub strategies: Vec<String>,
    /// Text to write logits of: a name of `kvlab list texts`, or a file (a file of base logits has its tokens in it)
    #[arg(short, long, value_name = "TEXT", default_value = "wikitext2-test")]
    pub file: String,
    /// Tokens of a chunk, when writing
    #[arg(short, long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u16).range(3..))]
    pub ctx_size: u16,
    /// Chunks at most [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub chunks: Option<u16>,
    /// Threads; never changes a number [default: all]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// What linear layers over q4_0, q4_1 and q8_0 weights compute in: f32, int16 or int8
    #[arg(long, value_name = "NAME", default_value = "f32")]
    pub arithmetic: String,
    /// Where to look.
    #[command(flatten)]
    pub places: Places,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// No progress, only the result
    #[arg(long, short)]
    pub quiet: bool,
}

/// `kvlab check-strategy`.
#[derive(Debug, Args)]
#[command(after_help = "\
Small layers and seeded random rows; no model is needed. A line per check: ok, FAILED, or n/a with the reason. A failure comes
with what runs that check alone again.
  oracle       attention over decoded rows in f64, by code of its own
  exactness    bytes alone carry a row; lossless gives the bits back, lossy errs within its bound
  causality    a later token changes no earlier output
  chunking     any chunks give the bits and bytes of token by token
  batching     a sequence in a ragged batch is as alone, to the bit
  fork         a fork goes on as a sequence of its own, to the bit
  truncate     going back is never having gone on, or the earliest length is named
  compress     a context compressed once is the same whatever its chunks
  short        1, 2, 3 tokens and lengths around a page
  ties         equal rows, zeros, tiny and huge ones: finite, and the same in any chunks
  non-finite   NaN and infinity are named by layer, head and position
  bytes        what is reported is what is allocated and what the format defines
  determinism  the same again gives the same bits, on 1, 2 and 3 threads
  device       a memory without host slices gives the same bits
  shapes       4Q/1KV, 9Q/3KV and 4Q/4KV heads of 20, 33, 64 and 80 channels

Examples:
  kvlab check-strategy int4-best
  kvlab check-strategy 'encode = \"q4_0\", tail = 32' --only oracle,bytes --seed 7
  kvlab check-strategy encode:int4                     every example of that stage, bare and behind a tail
  kvlab check-strategy --all --json
Exit code 1 when a check failed, 2 when nothing could be checked.")]
pub struct CheckStrategyArgs {
    /// Preset, format (K/V where they differ), stage (kind:name for all examples of a format), or the keys of a strategy table
    #[arg(value_name = "NAME")]
    pub names: Vec<String>,
    /// Every preset, and every example of every registered stage
    #[arg(long)]
    pub all: bool,
    /// Only these checks
    #[arg(long, value_name = "CHECK", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Seed of all random rows
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// How `kvlab bench` writes its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BenchForm {
    /// A Markdown table, with what stands beside it.
    Md,
    /// All fields, a line per row.
    Csv,
    /// All fields and the time of each run.
    Json,
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
    /// Questions with answers.
    Tasks,
    /// Built-in models.
    Models,
}

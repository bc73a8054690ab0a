//! What `kvlab bench` measured, as Markdown, CSV or JSON: llama-bench's test names, columns and fields where it has them.
//!
//! Invariants: one row per strategy, test, depth and number of threads; CSV and JSON share one list of fields; a row
//! whose strategy fails its check says so in every form; what does not apply is empty, never 0.

use serde_json::{Value, json};

use super::format::{count, significant};
use super::latency;
use crate::eval::bench::cell::Cell;
use crate::eval::bench::gate::Gate;
use crate::eval::bench::{Measured, Work};

/// One strategy.
#[derive(Debug, Clone)]
pub struct Entrant {
    /// Its name.
    pub label: String,
    /// Format of K, with its maps.
    pub type_k: String,
    /// Format of V, with its maps.
    pub type_v: String,
    /// What its check found.
    pub gate: Gate,
}

/// All that a table is made of.
#[derive(Debug, Clone)]
pub struct Sheet {
    /// Version of the program, and the commit where it is known.
    pub build: String,
    /// The processor.
    pub cpu: String,
    /// The model's name.
    pub model: String,
    /// Bytes of all its tensors as stored.
    pub model_bytes: u64,
    /// Its parameters.
    pub n_params: u64,
    /// Bytes of weights that one decode step reads.
    pub weight_bytes: u64,
    /// What computes.
    pub backend: String,
    /// The strategies.
    pub entrants: Vec<Entrant>,
    /// Bytes per second that this machine reads, by number of threads.
    pub read_bytes_per_s: Vec<(usize, f64)>,
    /// The machine.
    pub host: Host,
    /// The rows.
    pub rows: Vec<Measured>,
    /// Strategies in a process of their own: index, depth and what it held.
    pub cells: Vec<(usize, usize, Cell)>,
}

/// The machine, and how busy it was.
#[derive(Debug, Clone, Default)]
pub struct Host {
    /// Threads that may run at once.
    pub n_cores: usize,
    /// The vector extensions that kernels choose by.
    pub cpu_flags: Vec<String>,
    /// Load average over a minute before anything ran.
    pub load_start: Option<f64>,
    /// The same at the end.
    pub load_end: Option<f64>,
}

/// A row and what it belongs to.
pub(super) struct At<'a> {
    pub(super) sheet: &'a Sheet,
    pub(super) row: &'a Measured,
}

/// A field of CSV and JSON: its name and how a row has it.
pub(super) type Field = (&'static str, fn(&At<'_>) -> Value);

/// Fields of CSV and JSON.
const FIELDS: &[Field] = &[
    ("build_commit", |at| at.sheet.build.clone().into()),
    ("cpu_info", |at| at.sheet.cpu.clone().into()),
    ("backends", |at| at.sheet.backend.clone().into()),
    ("model_type", |at| at.sheet.model.clone().into()),
    ("model_size", |at| at.sheet.model_bytes.into()),
    ("model_n_params", |at| at.sheet.n_params.into()),
    ("n_threads", |at| at.row.n_threads.into()),
    ("strategy", |at| at.entrant().label.clone().into()),
    ("type_k", |at| at.entrant().type_k.clone().into()),
    ("type_v", |at| at.entrant().type_v.clone().into()),
    ("n_prompt", |at| at.tokens_of(Work::Prefill).into()),
    ("n_gen", |at| at.tokens_of(Work::Decode).into()),
    ("n_score", |at| at.tokens_of(Work::Score).into()),
    ("n_no_cache", |at| at.tokens_of(Work::Recompute).into()),
    ("n_depth", |at| at.row.test.depth.into()),
    ("test", |at| at.row.test.to_string().into()),
    ("avg_ns", |at| at.wall_ns().0.round().into()),
    ("stddev_ns", |at| at.wall_ns().1.map(f64::round).into()),
    ("avg_ts", |at| at.speed().0.into()),
    ("stddev_ts", |at| at.speed().1.into()),
    ("tokens_per_cpu_s", |at| at.row.tokens_per_cpu_s().into()),
    ("cache_bytes", |at| at.row.memory.stored_bytes().into()),
    ("peak_rss_bytes", |at| at.row.peak_rss_bytes.into()),
    ("bytes_per_step", |at| at.bytes_per_step().into()),
    ("bytes_per_s", |at| at.bytes_per_s().into()),
    ("machine_read_bytes_per_s", |at| at.machine().into()),
    ("linear_share", |at| at.share(|p| p.linear).into()),
    ("head_share", |at| at.share(|p| p.head).into()),
    ("attention_share", |at| at.share(|p| p.attention).into()),
    ("encoding_share", |at| at.share(|p| p.encoding).into()),
    ("rest_share", |at| at.share(|p| p.rest).into()),
    ("perplexity", |at| at.row.perplexity.into()),
    ("gate_holds", |at| at.entrant().gate.holds().into()),
    ("gate_max_logit_difference", |at| {
        at.entrant().gate.max_logit_difference.into()
    }),
    ("gate_mean_kld", |at| at.entrant().gate.mean_kld.into()),
    ("gate_same_top_fraction", |at| {
        at.entrant().gate.same_top_fraction.into()
    }),
];

impl At<'_> {
    pub(super) fn entrant(&self) -> &Entrant {
        &self.sheet.entrants[self.row.strategy]
    }

    fn tokens_of(&self, work: Work) -> usize {
        let test = self.row.test;
        if test.work == work { test.n } else { 0 }
    }

    fn wall_ns(&self) -> (f64, Option<f64>) {
        let runs = self.row.runs.iter();
        mean_and_deviation(&runs.map(|r| r.wall.as_nanos() as f64).collect::<Vec<_>>())
    }

    fn speed(&self) -> (f64, Option<f64>) {
        mean_and_deviation(&self.row.tokens_per_s())
    }

    /// Bytes that a decode step reads: weights, and the cache that is attended. A chunk of a prefill shares both between
    /// its tokens, so it has none.
    fn bytes_per_step(&self) -> Option<f64> {
        let bytes = self.sheet.weight_bytes as f64 + self.row.attended_bytes;
        (self.row.test.work == Work::Decode).then_some(bytes)
    }

    fn bytes_per_s(&self) -> Option<f64> {
        let seconds_per_step = self.wall_ns().0 / 1e9 / self.row.test.n as f64;
        self.bytes_per_step().map(|bytes| bytes / seconds_per_step)
    }

    fn machine(&self) -> Option<f64> {
        let all = self.sheet.read_bytes_per_s.iter();
        let mut mine = all.filter(|(threads, _)| *threads == self.row.n_threads);
        mine.next().map(|(_, bytes_per_s)| *bytes_per_s)
    }

    fn share(&self, part: fn(&crate::eval::bench::Parts) -> std::time::Duration) -> f64 {
        let parts = &self.row.parts;
        part(parts).as_secs_f64() / parts.total().as_secs_f64()
    }
}

/// All fields.
fn fields() -> impl Iterator<Item = &'static Field> {
    FIELDS.iter().chain(latency::FIELDS)
}

impl Sheet {
    pub(super) fn rows(&self) -> impl Iterator<Item = At<'_>> {
        self.rows.iter().map(|row| At { sheet: self, row })
    }
}

/// An array of objects, a row each, with the time of each run.
pub fn json(sheet: &Sheet) -> String {
    let rows = sheet.rows().map(|at| {
        let mut object: serde_json::Map<String, Value> = fields()
            .map(|(name, value)| ((*name).to_owned(), value(&at)))
            .collect();
        let runs = &at.row.runs;
        let wall: Vec<u64> = runs.iter().map(|r| r.wall.as_nanos() as u64).collect();
        let cpu: Vec<u64> = runs.iter().map(|r| r.cpu.as_nanos() as u64).collect();
        object.insert("samples_ns".to_owned(), json!(wall));
        object.insert("samples_cpu_ns".to_owned(), json!(cpu));
        let gaps: Vec<u64> = at.row.gaps.iter().map(|g| g.as_nanos() as u64).collect();
        object.insert("samples_ts".to_owned(), json!(at.row.tokens_per_s()));
        object.insert("samples_itl_ns".to_owned(), json!(gaps));
        Value::Object(object)
    });
    let rows: Vec<Value> = rows.collect();
    // Values of this kind can always be written.
    serde_json::to_string_pretty(&rows).unwrap_or_default() + "\n"
}

/// A line of names, then a line per row.
pub fn csv(sheet: &Sheet) -> String {
    let names = fields().map(|(name, _)| (*name).to_owned());
    let mut out = super::csv::Lines::new(names);
    for at in sheet.rows() {
        out.push(fields().map(|(_, value)| match value(&at) {
            Value::Null => String::new(),
            Value::String(text) => text,
            other => other.to_string(),
        }));
    }
    out.0
}

const HEADS: [&str; 19] = [
    "model",
    "size",
    "params",
    "backend",
    "threads",
    "strategy",
    "test",
    "t/s",
    "t/CPU s",
    "cache MiB",
    "MiB/step",
    "GB/s",
    "linear %",
    "head %",
    "attention %",
    "encoding %",
    "rest %",
    "max |Δlogit|",
    "KLD",
];

/// The table, the machine's read bandwidth and what the checks found.
pub fn markdown(sheet: &Sheet) -> String {
    let rows = sheet.rows().map(|at| cells(&at).to_vec());
    let mut out = super::markdown::table(&super::markdown::plain(&HEADS, rows));
    out.push('\n');
    out.push_str(&latency::markdown(sheet));
    for at in sheet.rows() {
        if let Some(perplexity) = at.row.perplexity {
            let (test, label) = (at.row.test, &at.entrant().label);
            out.push_str(&format!(
                "perplexity: {label} {test} {perplexity:.4} over its second half\n"
            ));
        }
    }
    for sentence in super::growth::sentences(sheet) {
        out.push_str(&(sentence + "\n"));
    }
    for (threads, bytes_per_s) in &sheet.read_bytes_per_s {
        out.push_str(&format!(
            "machine: {} read memory at {} GB/s\n",
            count(*threads, "thread"),
            significant(bytes_per_s / 1e9, 3)
        ));
    }
    if let Some(bytes) = sheet.rows.iter().filter_map(|r| r.peak_rss_bytes).max() {
        out.push_str(&format!(
            "memory: {} MiB at most, the whole process with all strategies' caches\n",
            significant(bytes as f64 / f64::from(1 << 20), 4)
        ));
    }
    for entrant in &sheet.entrants {
        out.push_str(&format!(
            "check: {} {}\n",
            entrant.label,
            verdict(&entrant.gate)
        ));
    }
    for sentence in latency::sentences(sheet) {
        out.push_str(&(sentence + "\n"));
    }
    out.push_str(&format!("build: {}, {}\n", sheet.build, sheet.cpu));
    out
}

fn cells(at: &At<'_>) -> [String; 19] {
    let mib = |bytes: f64| significant(bytes / f64::from(1 << 20), 4);
    let percent = |share: f64| format!("{:.1}", 100.0 * share);
    let (sheet, gate) = (at.sheet, &at.entrant().gate);
    let speed = at.speed();
    let mark = if gate.holds() { "" } else { " FAILED" };
    [
        sheet.model.clone(),
        format!("{} MiB", mib(sheet.model_bytes as f64)),
        format!("{:.2} M", sheet.n_params as f64 / 1e6),
        sheet.backend.clone(),
        at.row.n_threads.to_string(),
        at.entrant().label.clone() + mark,
        at.row.test.to_string(),
        with_deviation(speed),
        at.row
            .tokens_per_cpu_s()
            .map_or_else(String::new, |x| format!("{x:.2}")),
        mib(at.row.memory.stored_bytes() as f64),
        at.bytes_per_step().map_or_else(String::new, mib),
        at.bytes_per_s()
            .map_or_else(String::new, |x| significant(x / 1e9, 3)),
        percent(at.share(|p| p.linear)),
        percent(at.share(|p| p.head)),
        percent(at.share(|p| p.attention)),
        percent(at.share(|p| p.encoding)),
        percent(at.share(|p| p.rest)),
        significant(f64::from(gate.max_logit_difference), 2),
        significant(gate.mean_kld, 2),
    ]
}

/// llama-bench's form: two decimals each.
fn with_deviation((mean, deviation): (f64, Option<f64>)) -> String {
    match deviation {
        Some(deviation) => format!("{mean:.2} ± {deviation:.2}"),
        None => format!("{mean:.2}"),
    }
}

fn verdict(gate: &Gate) -> String {
    let n = gate.n_tokens;
    if let Some(at) = gate.first_non_finite {
        return format!(
            "FAILED: a logit at position {at} of {n} is no finite number; do not use its times"
        );
    }
    if let Some(at) = gate.first_difference {
        return format!(
            "FAILED: from position {at} of {n} on, logits of single steps differ from those of a chunk; do not use its times"
        );
    }
    format!(
        "{n} single steps equal chunks to the bit, on all numbers of threads; against f32 rows: same top token {:.1} %, KLD {}",
        100.0 * gate.same_top_fraction,
        significant(gate.mean_kld, 2),
    )
}

/// The mean, and the sample deviation of more than one value.
fn mean_and_deviation(values: &[f64]) -> (f64, Option<f64>) {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let squares = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>();
    (
        mean,
        (values.len() > 1).then(|| (squares / (n - 1.0)).sqrt()),
    )
}

#[cfg(test)]
mod tests {
    use super::super::bench_fixture::{self as fixture, entrant, gate, ms};
    use super::*;
    use crate::eval::bench::Parts;

    fn sheet() -> Sheet {
        let row = |strategy, work| Measured {
            n_threads: 2,
            parts: Parts {
                linear: ms(180),
                head: ms(90),
                attention: ms(90),
                encoding: ms(45),
                rest: ms(45),
                scoring: ms(15),
            },
            attended_bytes: 50e6,
            peak_rss_bytes: Some(300 << 20),
            ..fixture::row(strategy, work, &[(ms(200), ms(400)), (ms(250), ms(400))])
        };
        let broken = Gate {
            first_difference: Some(7),
            ..gate()
        };
        fixture::sheet(
            vec![entrant("k8v4", gate()), entrant("odd", broken)],
            vec![row(0, Work::Decode), row(1, Work::Prefill)],
        )
    }

    #[test]
    fn fields_are_the_same_in_csv_and_json() {
        let rows: Vec<Value> = serde_json::from_str(&json(&sheet())).unwrap();
        let first = &rows[0];
        // 10 tokens in 200 and 250 ms, 400 ms of CPU each.
        assert_eq!(first["avg_ts"], 45.0);
        assert!((first["stddev_ts"].as_f64().unwrap() - 50f64.sqrt()).abs() < 1e-12);
        assert_eq!(first["tokens_per_cpu_s"], 25.0);
        assert_eq!(first["samples_ns"], json!([200_000_000, 250_000_000]));
        // 100 MB a step, 22.5 ms a step.
        assert!((first["bytes_per_s"].as_f64().unwrap() / 4.444e9 - 1.0).abs() < 1e-3);
        assert_eq!(first["machine_read_bytes_per_s"], 40e9);
        assert!((first["attention_share"].as_f64().unwrap() - 0.2).abs() < 1e-12);
        assert_eq!(
            (&first["n_gen"], &first["n_prompt"]),
            (&json!(10), &json!(0))
        );
        assert_eq!(first["peak_rss_bytes"], 300 << 20);
        assert_eq!(rows[1]["bytes_per_step"], Value::Null);
        assert_eq!(rows[1]["gate_holds"], false);
        let csv = csv(&sheet());
        let lines: Vec<&str> = csv.lines().collect();
        assert_eq!(lines.len(), 3);
        assert_eq!(lines[0].split(',').count(), fields().count());
        assert!(lines[1].starts_with(
            "0.1.0,\"a, \"\"b\"\"\",cpu,m,1048576,1500000,2,k8v4,q8_0,q4_0,0,10,0,0,64,tg10 @ d64,"
        ));
    }

    #[test]
    fn a_strategy_that_fails_its_check_is_marked() {
        let text = markdown(&sheet());
        assert!(
            text.contains("| k8v4       | tg10 @ d64 | 45.00 ± 7.07 | 25.00"),
            "{text}"
        );
        assert!(text.contains("| odd FAILED | pp10 @ d64 |"), "{text}");
        assert!(
            text.contains("check: odd FAILED: from position 7 of 192 on"),
            "{text}"
        );
        assert!(
            text.contains("2 threads read memory at 40.0 GB/s"),
            "{text}"
        );
        assert!(text.contains("memory: 300.0 MiB at most"), "{text}");
    }
}

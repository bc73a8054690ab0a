//! A results file of lm-evaluation-harness as rows of a table, to stand beside ours.
//!
//! Read are `results` (`"acc,none"`, `"acc_stderr,none"`), `versions`, `n-shot`, `n-samples`, `higher_is_better`, `model_name`,
//! `lm_eval_version` and `git_hash`, as version 0.4 of the harness writes them. A group of tasks is a row like a task; what it is
//! over is in its own `sample_count`.
//!
//! Invariant: one row per task, filter and metric; what the file does not say is empty, never 0.

use std::path::Path;

use serde::Serialize;
use serde_json::{Map, Value};

/// What can be wrong with a results file.
#[derive(Debug, thiserror::Error)]
pub enum LmEvalError {
    /// It can't be read.
    #[error("can't read `{path}`: {source}")]
    Read {
        /// The file.
        path: String,
        /// Why not.
        source: std::io::Error,
    },
    /// It is no JSON.
    #[error("`{path}` is no JSON: {source}")]
    Json {
        /// The file.
        path: String,
        /// Where and why.
        source: serde_json::Error,
    },
    /// It is another JSON.
    #[error(
        "`{path}`: {what}; a results file of lm-evaluation-harness is called results_DATE.json and has a table of tasks under `results`"
    )]
    Shape {
        /// The file.
        path: String,
        /// What is missing or wrong.
        what: String,
    },
}

/// One metric of one task.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PeerRow {
    /// The model, as the harness calls it.
    pub model: String,
    /// The task.
    pub task: String,
    /// Its version.
    pub version: Option<String>,
    /// What answers went through before they were scored.
    pub filter: String,
    /// Examples in each prompt.
    pub n_shot: Option<i64>,
    /// The metric.
    pub metric: String,
    /// Whether more is better.
    pub higher_is_better: Option<bool>,
    /// The value.
    pub value: Option<f64>,
    /// Its standard error.
    pub stderr: Option<f64>,
    /// Items that were scored.
    pub n: Option<u64>,
    /// Version of the harness.
    pub lm_eval_version: Option<String>,
    /// Commit of the harness.
    pub git_hash: Option<String>,
}

/// Reads a file.
///
/// # Errors
/// A file that can't be read, or is no results file.
pub fn read(path: &Path) -> Result<Vec<PeerRow>, LmEvalError> {
    let name = path.display().to_string();
    match std::fs::read_to_string(path) {
        Ok(text) => parse(&name, &text),
        Err(source) => Err(LmEvalError::Read { path: name, source }),
    }
}

/// Reads a file's text; `name` is how messages call it.
///
/// # Errors
/// A text that is no results file.
pub fn parse(name: &str, text: &str) -> Result<Vec<PeerRow>, LmEvalError> {
    let file: Value = serde_json::from_str(text).map_err(|source| LmEvalError::Json {
        path: name.to_owned(),
        source,
    })?;
    let shape = |what: String| LmEvalError::Shape {
        path: name.to_owned(),
        what,
    };
    let tasks = file.get("results").and_then(Value::as_object);
    let tasks = tasks.ok_or_else(|| shape("there is no table `results`".to_owned()))?;
    let mut rows = Vec::new();
    for (task, metrics) in tasks {
        let metrics = metrics.as_object();
        let metrics = metrics.ok_or_else(|| shape(format!("results.{task} is no table")))?;
        rows.extend(rows_of(&file, task, metrics));
    }
    match rows.is_empty() {
        true => Err(shape("`results` holds no metric".to_owned())),
        false => Ok(rows),
    }
}

fn rows_of(file: &Value, task: &str, metrics: &Map<String, Value>) -> Vec<PeerRow> {
    let of_task = |key: &str| file.get(key).and_then(|table| table.get(task));
    let plain = |v: &Value| v.as_str().map_or_else(|| v.to_string(), str::to_owned);
    let text = |key: &str| file.get(key).and_then(Value::as_str).map(str::to_owned);
    let model = text("model_name").or_else(|| {
        let config = file.get("config")?;
        config.get("model").map(plain)
    });
    let row = |(key, value): (&String, &Value)| {
        // `acc,none`; other keys are the task's name and its like.
        let (metric, filter) = key.split_once(',')?;
        if metric.ends_with("_stderr") {
            return None;
        }
        let stderr = metrics.get(&format!("{metric}_stderr,{filter}"));
        let of_group = || metrics.get("sample_count").and_then(|count| count.get(key));
        Some(PeerRow {
            model: model.clone().unwrap_or_default(),
            task: task.to_owned(),
            version: of_task("versions").map(plain),
            filter: filter.to_owned(),
            n_shot: of_task("n-shot").and_then(Value::as_i64),
            metric: metric.to_owned(),
            higher_is_better: of_task("higher_is_better")
                .and_then(|t| t.get(metric))
                .and_then(Value::as_bool),
            value: value.as_f64(),
            // The harness writes "N/A" where it has none.
            stderr: stderr.and_then(Value::as_f64),
            n: of_task("n-samples")
                .and_then(|n| n.get("effective"))
                .or_else(of_group)
                .and_then(Value::as_u64),
            lm_eval_version: text("lm_eval_version"),
            git_hash: text("git_hash"),
        })
    };
    metrics.iter().filter_map(row).collect()
}

/// The rows as the harness's own table, with n.
pub fn markdown(rows: &[PeerRow]) -> String {
    let mut versions: Vec<&str> = Vec::new();
    for version in rows.iter().filter_map(|r| r.lm_eval_version.as_deref()) {
        if !versions.contains(&version) {
            versions.push(version);
        }
    }
    let version = match versions.is_empty() {
        true => String::new(),
        false => format!(" {}", versions.join(", ")),
    };
    let mut out = format!(
        "lm-evaluation-harness{version}; Stderr is its own: one standard error of the mean over items\n\n\
         | model | task | version | filter | n-shot | metric | | value | | stderr | n |\n\
         |---|---|---:|---|---:|---|---|---:|---|---:|---:|\n",
    );
    let number = |x: Option<f64>| x.map_or_else(String::new, |x| format!("{x:.4}"));
    for row in rows {
        let direction = match row.higher_is_better {
            Some(true) => "↑",
            Some(false) => "↓",
            None => "",
        };
        out += &format!(
            "| {} | {} | {} | {} | {} | {} | {direction} | {} | {} | {} | {} |\n",
            row.model,
            row.task,
            row.version.as_deref().unwrap_or_default(),
            row.filter,
            row.n_shot.map_or_else(String::new, |n| n.to_string()),
            row.metric,
            number(row.value),
            if row.stderr.is_some() { "±" } else { "" },
            number(row.stderr),
            row.n.map_or_else(String::new, |n| n.to_string()),
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"{
        "results": {
            "arc_easy": {"alias": "arc_easy", "sample_len": 50, "acc,none": 0.62, "acc_stderr,none": 0.069338,
                         "acc_norm,none": 0.58, "acc_norm_stderr,none": "N/A"},
            "gsm8k": {"alias": "gsm8k", "exact_match,strict-match": 0.0, "exact_match_stderr,strict-match": 0.0,
                      "exact_match,flexible-extract": 0.02, "exact_match_stderr,flexible-extract": 0.02}
        },
        "versions": {"arc_easy": 1.0, "gsm8k": 3},
        "n-shot": {"arc_easy": 0, "gsm8k": 5},
        "n-samples": {"arc_easy": {"original": 2376, "effective": 50}},
        "higher_is_better": {"arc_easy": {"acc": true, "acc_norm": true}},
        "config": {"model": "hf"},
        "model_name": "SmolLM2-135M-Instruct",
        "git_hash": "abc123"
    }"#;

    #[test]
    fn each_metric_is_a_row() {
        let rows = parse("results.json", FILE).unwrap();
        let told: Vec<_> = rows
            .iter()
            .map(|r| {
                (
                    r.task.as_str(),
                    r.metric.as_str(),
                    r.filter.as_str(),
                    r.value,
                    r.stderr,
                    r.n,
                )
            })
            .collect();
        assert_eq!(
            told,
            [
                (
                    "arc_easy",
                    "acc",
                    "none",
                    Some(0.62),
                    Some(0.069338),
                    Some(50)
                ),
                ("arc_easy", "acc_norm", "none", Some(0.58), None, Some(50)),
                (
                    "gsm8k",
                    "exact_match",
                    "strict-match",
                    Some(0.0),
                    Some(0.0),
                    None
                ),
                (
                    "gsm8k",
                    "exact_match",
                    "flexible-extract",
                    Some(0.02),
                    Some(0.02),
                    None
                ),
            ]
        );
        assert_eq!(
            (rows[2].n_shot, rows[2].version.as_deref()),
            (Some(5), Some("3"))
        );
        assert_eq!(
            (rows[0].higher_is_better, rows[2].higher_is_better),
            (Some(true), None)
        );
        let table = markdown(&rows);
        assert!(
            table.contains(
                "| SmolLM2-135M-Instruct | arc_easy | 1.0 | none | 0 | acc | ↑ | 0.6200 | ± | 0.0693 | 50 |"
            ),
            "{table}"
        );
        assert!(
            table.contains("| acc_norm | ↑ | 0.5800 |  |  | 50 |"),
            "{table}"
        );
    }

    /// What `lm_eval run` 0.4.13 wrote of SmolLM2-135M-Instruct, a group of two tasks among them; templates, prompts and
    /// facts about the machine are left out.
    #[test]
    fn a_file_that_the_harness_wrote() {
        let text = include_str!("../../tests/golden/lm_eval_results.json");
        let rows = parse("results.json", text).unwrap();
        let of = |task: &str| {
            let found = rows.iter().filter(|r| r.task == task);
            found
                .map(|r| (r.metric.as_str(), r.value, r.n))
                .collect::<Vec<_>>()
        };
        assert_eq!(
            of("piqa_local"),
            [
                ("acc", Some(0.7), Some(20)),
                ("acc_norm", Some(0.7), Some(20))
            ]
        );
        assert_eq!(of("choice_local"), [("acc", Some(0.675), Some(40))]);
        assert_eq!(of("gsm8k_local").len(), 2);
        assert!(
            rows.iter()
                .all(|r| r.lm_eval_version.as_deref() == Some("0.4.13"))
        );
        assert!(
            rows.iter()
                .all(|r| r.git_hash.is_none() && r.stderr.is_some())
        );
        let table = markdown(&rows);
        assert!(
            table.starts_with("lm-evaluation-harness 0.4.13; "),
            "{table}"
        );
    }

    #[test]
    fn what_is_no_results_file_is_refused() {
        for (text, told) in [
            ("{", "`x.json` is no JSON: EOF"),
            ("{\"result\": {}}", "there is no table `results`"),
            ("{\"results\": {\"piqa\": 3}}", "results.piqa is no table"),
            (
                "{\"results\": {\"piqa\": {\"alias\": \"piqa\"}}}",
                "holds no metric",
            ),
        ] {
            let error = parse("x.json", text).unwrap_err().to_string();
            assert!(error.contains(told), "{error}");
        }
        let error = read(Path::new("no-such.json")).unwrap_err().to_string();
        assert!(error.starts_with("can't read `no-such.json`"), "{error}");
    }
}

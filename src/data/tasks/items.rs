//! Items of a file, put into words by a definition's templates.
//!
//! Invariants: the first `shots` items are the solved examples before every question, the same for all; no item is both.

use minijinja::{Environment, Value};
use serde_json::json;

use super::definition::{Format, Items, Source};
use super::{AnswerOption, Asking, Example, Question, TaskDef, TaskError};

/// Between two solved examples.
const BETWEEN: &str = "\n\n";

/// The items of a task's files.
pub(super) fn read(def: &TaskDef, texts: &[String]) -> Result<Vec<serde_json::Value>, TaskError> {
    let (Some(Source::Items(items)), Some(text)) = (def.source(), texts.first()) else {
        return Ok(Vec::new());
    };
    let wrong = |item: usize, reason: String| TaskError::Item {
        task: def.name.clone(),
        item,
        reason,
    };
    let mut all = match items.format {
        Format::Jsonl => text
            .lines()
            .filter(|l| !l.trim().is_empty())
            .enumerate()
            .map(|(i, line)| {
                serde_json::from_str(line).map_err(|e| wrong(i, format!("no JSON: {e}")))
            })
            .collect::<Result<Vec<serde_json::Value>, _>>()?,
        Format::SixLines => {
            let lines: Vec<&str> = text.lines().collect();
            if !lines.len().is_multiple_of(6) {
                let reason = format!("the file has {} lines, not six per item", lines.len());
                return Err(wrong(lines.len() / 6, reason));
            }
            let item = |l: &[&str]| json!({ "query": l[0], "label": l[1], "choices": &l[2..] });
            lines.chunks(6).map(item).collect()
        }
    };
    if let Some(labels) = texts.get(1) {
        let labels: Vec<&str> = labels.lines().collect();
        if labels.len() != all.len() {
            let reason = format!("{} labels for {} items", labels.len(), all.len());
            return Err(wrong(labels.len().min(all.len()), reason));
        }
        for (i, (item, label)) in all.iter_mut().zip(labels).enumerate() {
            let Some(fields) = item.as_object_mut() else {
                return Err(wrong(i, "is no object".to_owned()));
            };
            fields.insert("label".to_owned(), json!(label));
        }
    }
    Ok(all)
}

/// An item in words.
struct Worded {
    contexts: Vec<String>,
    choices: Vec<String>,
    gold: usize,
    wanted: Vec<String>,
}

/// The examples of a file: the first items as shots, the next ones as questions.
pub(super) fn examples(
    def: &TaskDef,
    items: &[serde_json::Value],
    asking: Asking,
) -> Result<Vec<Example>, TaskError> {
    let Some(Source::Items(templates)) = def.source() else {
        return Ok(Vec::new());
    };
    let left = items.len().saturating_sub(asking.shots);
    if left < asking.items {
        return Err(TaskError::TooFew {
            task: def.name.clone(),
            got: items.len(),
            asked: asking.items,
            shots: asking.shots,
            left,
        });
    }
    let environment = Environment::new();
    let word = |i: usize| -> Result<Worded, TaskError> {
        worded(&environment, templates, &items[i]).map_err(|reason| TaskError::Item {
            task: def.name.clone(),
            item: i,
            reason,
        })
    };
    let mut shots = String::new();
    for i in 0..asking.shots {
        let solved = word(i)?;
        let context = &solved.contexts[solved.gold.min(solved.contexts.len() - 1)];
        let choice = &solved.choices[solved.gold];
        let joint = templates.shot_delimiter.as_ref();
        let joint = joint.unwrap_or(&templates.delimiter);
        shots.push_str(&format!("{context}{joint}{choice}{BETWEEN}"));
    }
    (asking.shots..asking.shots + asking.items)
        .map(|i| Ok(example(def, templates, (&shots, i), word(i)?)))
        .collect()
}

fn example(def: &TaskDef, templates: &Items, (shots, i): (&str, usize), item: Worded) -> Example {
    let of_choice = |c: usize| &item.contexts[c.min(item.contexts.len() - 1)];
    let options = item
        .choices
        .iter()
        .enumerate()
        .map(|(c, choice)| AnswerOption {
            before: format!("{shots}{}", of_choice(c)),
            target: format!("{}{choice}", templates.delimiter),
            n_chars: choice.chars().count(),
        });
    Example {
        doc: format!("{} {i}", def.name),
        depth: None,
        context: format!("{shots}{}", of_choice(0)),
        questions: vec![Question {
            options: options.collect(),
            gold: item.gold,
            wanted: item.wanted,
        }],
    }
}

fn worded(
    environment: &Environment<'_>,
    templates: &Items,
    item: &serde_json::Value,
) -> Result<Worded, String> {
    let fields = Value::from(minijinja::value::Serde(item));
    let value = |expression: &str| {
        environment
            .compile_expression(expression)
            .and_then(|e| e.eval(fields.clone()))
            .map_err(|e| format!("`{expression}`: {e}"))
    };
    let texts = |expression: &str| -> Result<Vec<String>, String> {
        let list = value(expression)?;
        let entries = list
            .try_iter()
            .map_err(|_| format!("`{expression}` is no list but {list}"))?;
        Ok(entries.map(|v| text_of(&v)).collect())
    };
    let contexts = match (&templates.context, &templates.contexts) {
        (Some(template), _) => vec![
            environment
                .render_str(template, fields.clone())
                .map_err(|e| format!("context: {e}"))?,
        ],
        (None, Some(expression)) => texts(expression)?,
        (None, None) => Vec::new(),
    };
    let choices = texts(&templates.choices)?;
    let gold = text_of(&value(&templates.gold)?);
    let gold: usize = gold
        .trim()
        .parse()
        .map_err(|_| format!("`{}` is {gold}, not an index", templates.gold))?;
    let fits = contexts.len() == 1 || contexts.len() == choices.len();
    if gold >= choices.len() || !fits {
        let (n, m) = (choices.len(), contexts.len());
        return Err(format!(
            "{n} choices, {m} contexts, the right one is {gold}"
        ));
    }
    if let Some(empty) = choices.iter().position(String::is_empty) {
        return Err(format!("choice {empty} is empty"));
    }
    let wanted = templates.wanted.as_deref().map_or(Ok(Vec::new()), texts)?;
    Ok(Worded {
        contexts,
        choices,
        gold,
        wanted,
    })
}

/// A string as it stands, anything else as it would print.
fn text_of(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}

//! What a protocol makes of a text or a task: windows, passages, or contexts with questions, as token ids.
//!
//! Invariants: an item fits the model's context, or is skipped, counted and named; every question has a token to score.

use anyhow::{Context, bail};

use crate::config::{Bos, Protocol};
use crate::data::tasks::prompt::{Branch, prompt};
use crate::data::tasks::{Asking, Generate, Task};
use crate::data::{DataRef, Lookup, Passages, Text};
use crate::model::ModelSpec;
use crate::model::tokenizer::Tokenizer;

/// One document or window, or a context with what is asked about it.
#[derive(Debug, Clone)]
pub struct Item {
    /// Name in records.
    pub doc: String,
    /// Tokens, BOS included where the plan asks for it; of a task: the context.
    pub ids: Vec<u32>,
    /// Where what is asked stands in a context that is made, 0 … 1.
    pub depth: Option<f64>,
    /// What is asked; empty for texts.
    pub questions: Vec<Question>,
}

/// A question in tokens.
#[derive(Debug, Clone)]
pub struct Question {
    /// Its options.
    pub branches: Vec<Branch>,
    /// Index of the right one.
    pub gold: usize,
    /// What a generated answer must give.
    pub wanted: Vec<String>,
}

/// The items that one protocol makes of one text.
#[derive(Debug, Clone, Default)]
pub struct Items {
    /// In order.
    pub items: Vec<Item>,
    /// Tokens of the text that no item covers.
    pub n_tokens_dropped: usize,
    /// Names of the items that do not fit the model's context, with their tokens.
    pub skipped: Vec<String>,
    /// Options whose border to the context lies inside a token.
    pub n_split_borders: usize,
    /// How answers are generated, where they are.
    pub generate: Option<Generate>,
}

/// A text or a task, loaded.
pub enum Source {
    /// A text.
    Text(Text),
    /// A task.
    Task(Box<Task>),
}

impl Source {
    /// Loads what a plan names.
    pub fn load(data: &DataRef, places: &Lookup) -> anyhow::Result<Self> {
        Ok(match data.is_task {
            true => Source::Task(Box::new(data.load_task(places)?)),
            false => Source::Text(data.load(places)?),
        })
    }
}

/// Whether an item starts with the model's BOS token.
pub fn starts_with_bos(bos: Bos, spec: &ModelSpec) -> bool {
    match bos {
        Bos::Model => spec.add_bos,
        Bos::Always => true,
        Bos::Never => false,
    }
}

fn prefix(protocol: &Protocol, spec: &ModelSpec) -> anyhow::Result<Vec<u32>> {
    if !starts_with_bos(protocol.bos(), spec) {
        return Ok(Vec::new());
    }
    let id = spec.bos_id.context(
        "`bos` asks for a BOS token, the model's file names none: write bos = \"never\"",
    )?;
    Ok(vec![id])
}

/// A protocol's items of a text or a task; `seed` is that of what is generated.
pub fn cut(
    source: &Source,
    (protocol, seed): (&Protocol, u64),
    spec: &ModelSpec,
    tokenizer: &Tokenizer,
) -> anyhow::Result<Items> {
    match source {
        Source::Text(text) => passages(text, protocol, spec, tokenizer),
        Source::Task(task) => questions(task, (protocol, seed), spec, tokenizer),
    }
}

fn questions(
    task: &Task,
    (protocol, seed): (&Protocol, u64),
    spec: &ModelSpec,
    tokenizer: &Tokenizer,
) -> anyhow::Result<Items> {
    let &Protocol::Tasks {
        shots,
        items,
        length,
        generate,
        ..
    } = protocol
    else {
        bail!(
            "`{}` is a task, the protocol is {}",
            task.def.name,
            protocol.kind()
        );
    };
    let prefix = prefix(protocol, spec)?;
    let asking = Asking {
        shots,
        items,
        length: length - prefix.len(),
        seed,
    };
    // A text that can't be encoded stops the run where its tokens are asked for.
    let n_tokens = |text: &str| tokenizer.encode(text).map_or(0, |ids| ids.len());
    let mut out = Items {
        generate: task.def.generate.clone().filter(|_| generate),
        ..Items::default()
    };
    let to_generate = out.generate.as_ref().map_or(0, |g| g.max_tokens);
    for example in task.examples(asking, &n_tokens)? {
        let Some(tokens) = prompt(&example, &prefix, |text| tokenizer.encode(text))? else {
            bail!(
                "{}: an answer has no tokens of its own, or nothing stands before it: nothing can be scored",
                example.doc
            );
        };
        let longest = tokens
            .branches
            .iter()
            .flatten()
            .map(|b| b.query.len() + b.target.len().max(to_generate));
        let n_tokens = tokens.context.len() + longest.max().unwrap_or(0);
        if n_tokens > spec.context_length {
            out.skipped
                .push(format!("{} ({n_tokens} tokens)", example.doc));
            continue;
        }
        out.n_split_borders += tokens.n_split_borders;
        let asked = example.questions.into_iter().zip(tokens.branches);
        out.items.push(Item {
            doc: example.doc,
            depth: example.depth,
            ids: tokens.context,
            questions: asked
                .map(|(question, branches)| Question {
                    branches,
                    gold: question.gold,
                    wanted: question.wanted,
                })
                .collect(),
        });
    }
    if out.items.is_empty() {
        bail!(
            "task `{}`: none of its items fits the model's context of {} tokens",
            task.def.name,
            spec.context_length
        );
    }
    Ok(out)
}

/// Cuts a text into a protocol's items.
fn passages(
    text: &Text,
    protocol: &Protocol,
    spec: &ModelSpec,
    tokenizer: &Tokenizer,
) -> anyhow::Result<Items> {
    let prefix = prefix(protocol, spec)?;
    // What a text goes on from is read; the rest of its document is not.
    let n_read = match protocol {
        Protocol::Generate { context, .. } => *context,
        _ => protocol.n_tokens(),
    };
    let n_tokens = n_read - prefix.len();
    let mut n_all = 0;
    let bodies: Vec<(String, Vec<u32>)> = match protocol {
        Protocol::Stream { windows, .. } => {
            let ids = tokenizer.encode(&text.text)?;
            n_all = ids.len();
            let windows = text.windows(&ids, n_tokens, *windows)?;
            windows
                .into_iter()
                .enumerate()
                .map(|(i, w)| (format!("{} window {i}", text.name), w.to_vec()))
                .collect()
        }
        Protocol::CompressOnce { documents, .. } | Protocol::Generate { documents, .. } => {
            let which = match protocol {
                Protocol::CompressOnce { passages, .. } => *passages,
                _ => Passages::Spread,
            };
            for document in text.documents() {
                n_all += tokenizer.encode(document)?.len();
            }
            let passages = text.passages(n_tokens, (*documents, which), |t| {
                tokenizer.encode(t).map_err(anyhow::Error::from)
            })?;
            passages
                .into_iter()
                .map(|p| (format!("{} {}@{}", text.name, p.document, p.start), p.ids))
                .collect()
        }
        Protocol::Tasks { .. } => bail!("`{}` is a text, the protocol is tasks", text.name),
    };
    let n_tokens_dropped = n_all - bodies.len() * n_tokens;
    let items = bodies
        .into_iter()
        .map(|(doc, body)| Item {
            doc,
            ids: prefix.iter().copied().chain(body).collect(),
            depth: None,
            questions: Vec::new(),
        })
        .collect();
    Ok(Items {
        items,
        n_tokens_dropped,
        ..Items::default()
    })
}

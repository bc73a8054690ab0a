//! A task's definition: a TOML file with Jinja templates over the fields of an item.
//!
//! Invariant: a definition that parses names where its items come from and everything that a prompt is made of.

use std::path::Path;

use serde::Deserialize;

use super::TaskError;
use super::synthetic::Plan;
use crate::data::DataRef;

/// The definitions that are part of the program: name and text.
pub fn builtin() -> &'static [(&'static str, &'static str)] {
    macro_rules! tasks {
        ($($name:literal),* $(,)?) => {
            &[$(($name, include_str!(concat!("../../../datasets/tasks/", $name, ".toml")))),*]
        };
    }
    tasks![
        "piqa",
        "arc_easy",
        "arc_challenge",
        "hellaswag",
        "winogrande",
        "openbookqa",
        "boolq",
        "lambada",
        "gsm8k",
        "niah_single_1",
        "niah_single_2",
        "niah_single_3",
        "niah_multikey_1",
        "niah_multikey_2",
        "niah_multikey_3",
        "niah_multivalue",
        "niah_multiquery",
        "vt",
        "cwe",
        "fwe",
        "passkey",
        "copy",
        "key_value",
        "code_recall",
    ]
}

/// A task, as its file defines it. datasets/README.md documents the fields.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TaskDef {
    /// Version of the format.
    schema: u32,
    /// Name in experiments and tables.
    pub name: String,
    /// Raised with every change of what is asked.
    pub version: u32,
    /// One line.
    pub doc: String,
    /// Where it was published.
    pub paper: String,
    /// A file of items, turned into prompts by templates.
    items: Option<Items>,
    /// Contexts made by the program from a seed.
    generated: Option<Plan>,
    /// What an answer is generated like, where one is.
    pub generate: Option<Generate>,
}

/// Where items come from.
#[derive(Debug, Clone, Copy)]
pub(super) enum Source<'a> {
    /// A file of items.
    Items(&'a Items),
    /// The program.
    Generated(&'a Plan),
}

/// A file of items and the templates over them.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Items {
    /// A text of the manifest, or a path relative to the definition.
    pub data: String,
    /// A second file with an item's label on each line.
    pub labels: Option<String>,
    /// How the file is read.
    pub format: Format,
    /// Template of the context.
    pub context: Option<String>,
    /// Expression: a context for each choice, where they differ.
    pub contexts: Option<String>,
    /// Expression: the list of choices; one entry for the one right continuation.
    pub choices: String,
    /// Expression: the index of the right choice.
    #[serde(default = "first")]
    pub gold: String,
    /// What joins context and choice.
    #[serde(default = "space")]
    pub delimiter: String,
    /// What joins them in a solved example; `delimiter` unless given.
    pub shot_delimiter: Option<String>,
    /// Expression: the texts that a generated answer must give.
    pub wanted: Option<String>,
}

fn first() -> String {
    "0".to_owned()
}

fn space() -> String {
    " ".to_owned()
}

/// Forms of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Format {
    /// An object on each line.
    Jsonl,
    /// Context, label and choices on a line each, as llama.cpp's `--hellaswag` reads them: `query`, `label`, `choices`.
    SixLines,
}

/// A generated answer and how it is judged.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Generate {
    /// Most tokens.
    pub max_tokens: usize,
    /// Texts that end it.
    #[serde(default)]
    pub stop: Vec<String>,
    /// Regular expression: its first group is the answer; the first match counts.
    pub pattern: Option<String>,
    /// What is asked of the answer.
    pub matching: Matching,
}

/// What makes an answer right.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Matching {
    /// It equals the one wanted text.
    Exact,
    /// The share of the wanted texts that it holds, in any case of letters.
    HoldsAll,
}

impl TaskDef {
    /// Reads a definition.
    ///
    /// # Errors
    /// [`TaskError::Definition`] with the place.
    pub fn parse(name: &str, text: &str) -> Result<Self, TaskError> {
        let wrong = |reason: String| TaskError::Definition {
            name: name.to_owned(),
            reason,
        };
        let def: Self = toml::from_str(text).map_err(|e| {
            let line = e
                .span()
                .map(|s| text[..s.start].matches('\n').count() + 1)
                .map_or(String::new(), |l| format!("line {l}: "));
            wrong(format!("{line}{}", e.message()))
        })?;
        if def.schema != 1 {
            return Err(wrong(format!(
                "schema is {}, this program reads 1",
                def.schema
            )));
        }
        if def.items.is_some() == def.generated.is_some() {
            return Err(wrong(
                "give [items] or [generated], one of the two".to_owned(),
            ));
        }
        if let Some(items) = &def.items
            && items.context.is_some() == items.contexts.is_some()
        {
            return Err(wrong(
                "give `context`, or `contexts` where each choice has its own".to_owned(),
            ));
        }
        if let Some(Err(e)) = def
            .generate
            .as_ref()
            .and_then(|g| g.pattern.as_ref())
            .map(|p| regex::Regex::new(p))
        {
            return Err(wrong(format!("generate.pattern: {e}")));
        }
        Ok(def)
    }

    /// The files of its items.
    pub(super) fn files(&self, path: Option<&Path>) -> Result<Vec<DataRef>, TaskError> {
        let Some(items) = &self.items else {
            return Ok(Vec::new());
        };
        let folder = path.and_then(Path::parent);
        std::iter::once(&items.data)
            .chain(&items.labels)
            .map(|name| match folder.map(|f| f.join(name)) {
                Some(file) if file.is_file() => Ok(DataRef::file(name, &file)?),
                _ => Ok(DataRef::named(name)?),
            })
            .collect()
    }

    /// Where its items come from; `None` never comes of [`TaskDef::parse`].
    pub(super) fn source(&self) -> Option<Source<'_>> {
        let items = self.items.as_ref().map(Source::Items);
        items.or(self.generated.as_ref().map(Source::Generated))
    }

    /// Whether its contexts are made by the program, to a length.
    pub fn is_generated(&self) -> bool {
        self.generated.is_some()
    }
}

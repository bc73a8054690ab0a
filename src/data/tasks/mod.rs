//! Tasks with questions: from a definition and its items to texts that are asked through a cache.
//!
//! Invariants: a definition is data (TOML with Jinja templates), one file each, with a version; what a task asks depends
//! on the definition, its items, the number of shots and the seed alone; nothing here knows tokens or a model.

mod definition;
mod items;
pub mod prompt;
pub mod synthetic;

pub use definition::{Generate, Matching, TaskDef, builtin};

use std::path::Path;

use super::{DataError, DataRef, Lookup, Split, sha256_hex};
use definition::Source;

/// One context and what is asked about it.
#[derive(Debug, Clone, PartialEq)]
pub struct Example {
    /// Name in records: where it stands in its file, or what was planted.
    pub doc: String,
    /// Where what is asked stands in a context that is made: 0 its start, 1 its end.
    pub depth: Option<f64>,
    /// The text that goes into the cache.
    pub context: String,
    /// What is asked; all on the same cache.
    pub questions: Vec<Question>,
}

/// One question with its options, or with the one right continuation.
#[derive(Debug, Clone, PartialEq)]
pub struct Question {
    /// In the task's order.
    pub options: Vec<AnswerOption>,
    /// Index of the right one.
    pub gold: usize,
    /// What a generated answer must hold; empty where nothing is generated.
    pub wanted: Vec<String>,
}

/// A continuation of the context that is scored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AnswerOption {
    /// The whole text before the scored part; starts with the context.
    pub before: String,
    /// The scored text.
    pub target: String,
    /// Characters by which its likelihood is normalised: those of the choice, without the space that joins it.
    pub n_chars: usize,
}

/// A task, loaded.
#[derive(Debug, Clone)]
pub struct Task {
    /// Its definition.
    pub def: TaskDef,
    /// Its items, where it has a file.
    items: Vec<serde_json::Value>,
}

/// What is wrong with a task.
#[derive(Debug, thiserror::Error)]
pub enum TaskError {
    /// No task of that name.
    #[error(
        "no task is called `{name}`{hint}: name one of {known}, or the path of a definition such as ./{name}.toml"
    )]
    Unknown {
        /// The name asked for.
        name: String,
        /// " (did you mean ...?)" or nothing.
        hint: String,
        /// Names of the program's own.
        known: String,
    },
    /// A definition can't be read.
    #[error("task definition `{name}`: {reason}")]
    Definition {
        /// The task.
        name: String,
        /// What is wrong, with line and column.
        reason: String,
    },
    /// An item does not fit the definition.
    #[error("task `{task}`, item {item}: {reason}")]
    Item {
        /// The task.
        task: String,
        /// Index in the file, from 0.
        item: usize,
        /// What is wrong.
        reason: String,
    },
    /// Fewer items than asked for.
    #[error(
        "task `{task}` has {got} items, {asked} are asked for with {shots} shots: set data.items to {left} or less"
    )]
    TooFew {
        /// The task.
        task: String,
        /// Items of the file.
        got: usize,
        /// Items asked for.
        asked: usize,
        /// Shots, the first items of the file.
        shots: usize,
        /// Items that are left for questions.
        left: usize,
    },
    /// A generated context can't be made so short.
    #[error(
        "task `{task}`: a context of {length} tokens holds no question, {least} is the least; raise `length`"
    )]
    TooShort {
        /// The task.
        task: String,
        /// Tokens asked for.
        length: usize,
        /// Tokens needed.
        least: usize,
    },
    /// Finding or reading its items.
    #[error(transparent)]
    Data(#[from] DataError),
}

/// What an experiment says of how a task is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asking {
    /// Solved examples before each question.
    pub shots: usize,
    /// Items.
    pub items: usize,
    /// Tokens of a generated context.
    pub length: usize,
    /// Seed of what is generated.
    pub seed: u64,
}

impl DataRef {
    /// The built-in task called `name`; its sum covers the definition and the items.
    ///
    /// # Errors
    /// [`TaskError::Unknown`] with the known names and the nearest one.
    pub fn task(name: &str) -> Result<Self, TaskError> {
        let names: Vec<&str> = builtin().iter().map(|t| t.0).collect();
        let Some((_, text)) = builtin().iter().find(|t| t.0 == name) else {
            return Err(TaskError::Unknown {
                name: name.to_owned(),
                hint: crate::config::did_you_mean(name, names.iter().copied())
                    .map_or(String::new(), |h| format!(" ({h})")),
                known: names.join(", "),
            });
        };
        Self::of_definition(name, text, None)
    }

    /// A task of the user's: a TOML file; paths of items are relative to it.
    ///
    /// # Errors
    /// [`TaskError::Definition`], or why its items can't be read.
    pub fn task_file(name: &str, path: &Path) -> Result<Self, TaskError> {
        let text = std::fs::read_to_string(path).map_err(|source| DataError::Io {
            path: path.to_owned(),
            source,
        })?;
        Self::of_definition(name, &text, Some(path))
    }

    fn of_definition(name: &str, text: &str, path: Option<&Path>) -> Result<Self, TaskError> {
        let def = TaskDef::parse(name, text)?;
        let mut identity = sha256_hex(text.as_bytes());
        for items in def.files(path)? {
            identity.push_str(&items.sha256);
        }
        Ok(Self {
            name: def.name.clone(),
            path: path.map(Path::to_owned),
            sha256: sha256_hex(identity.as_bytes()),
            split: if path.is_some() {
                Split::Own
            } else {
                Split::Test
            },
            domain: Some(def.name),
            separator: None,
            is_task: true,
        })
    }

    /// Reads a task's definition and items, and checks them.
    ///
    /// # Errors
    /// [`TaskError`]; a changed file is [`DataError::Checksum`].
    pub fn load_task(&self, lookup: &Lookup) -> Result<Task, TaskError> {
        let again = match &self.path {
            Some(path) => Self::task_file(&self.name, path)?,
            None => Self::task(&self.name)?,
        };
        if again.sha256 != self.sha256 {
            return Err(DataError::Checksum {
                name: self.name.clone(),
                place: "its definition".to_owned(),
                got: again.sha256,
                expected: self.sha256.clone(),
            }
            .into());
        }
        let text = match &self.path {
            Some(path) => std::fs::read_to_string(path).map_err(|source| DataError::Io {
                path: path.clone(),
                source,
            })?,
            None => builtin()
                .iter()
                .find(|t| t.0 == self.name)
                .map_or_else(String::new, |t| t.1.to_owned()),
        };
        let def = TaskDef::parse(&self.name, &text)?;
        let texts = def
            .files(self.path.as_deref())?
            .iter()
            .map(|f| Ok(f.load(lookup)?.text))
            .collect::<Result<Vec<String>, DataError>>()?;
        let items = items::read(&def, &texts)?;
        Ok(Task { def, items })
    }
}

impl Task {
    /// What is asked. `n_tokens` counts the tokens of a text: generated contexts are made to a length in tokens.
    ///
    /// # Errors
    /// [`TaskError::TooFew`], [`TaskError::Item`], [`TaskError::TooShort`].
    pub fn examples(
        &self,
        asking: Asking,
        n_tokens: &dyn Fn(&str) -> usize,
    ) -> Result<Vec<Example>, TaskError> {
        match self.def.source() {
            Some(Source::Items(_)) => items::examples(&self.def, &self.items, asking),
            Some(Source::Generated(plan)) => {
                synthetic::examples(&self.def.name, plan, asking, n_tokens)
            }
            None => Ok(Vec::new()),
        }
    }
}

#[cfg(test)]
mod tests;

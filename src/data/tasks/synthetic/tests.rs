//! Tests of generated contexts.

use super::super::{Asking, Task, builtin};
use super::*;
use crate::data::{DataRef, Lookup};

/// About four characters a token.
fn n_tokens(text: &str) -> usize {
    text.len().div_ceil(4)
}

fn generated() -> Vec<Task> {
    builtin()
        .iter()
        .map(|(name, text)| {
            (
                name,
                crate::data::tasks::TaskDef::parse(name, text).unwrap(),
            )
        })
        .filter(|(_, def)| def.is_generated())
        .map(|(name, _)| {
            DataRef::task(name)
                .unwrap()
                .load_task(&Lookup::default())
                .unwrap()
        })
        .collect()
}

fn asking(items: usize, length: usize, seed: u64) -> Asking {
    Asking {
        shots: 0,
        items,
        length,
        seed,
    }
}

#[test]
fn contexts_fill_their_length_and_hold_what_is_asked() {
    let tasks = generated();
    assert!(tasks.len() >= 15);
    for task in &tasks {
        for length in [1024, 2048] {
            let examples = task.examples(asking(4, length, 5), &n_tokens).unwrap();
            assert_eq!(examples.len(), 4);
            for e in &examples {
                let n = n_tokens(&e.context);
                assert!(
                    n <= length && n > length * 8 / 10,
                    "{}: {n} of {length}",
                    e.doc
                );
                assert!(!e.questions.is_empty());
                for q in &e.questions {
                    let option = &q.options[0];
                    assert!(option.before.starts_with(&e.context), "{}", e.doc);
                    for wanted in &q.wanted {
                        let haystack = e.context.to_lowercase().replace('_', "-");
                        assert!(
                            haystack.contains(&wanted.to_lowercase()),
                            "{}: {wanted}",
                            e.doc
                        );
                        assert!(option.target.contains(wanted), "{}: {wanted}", e.doc);
                    }
                }
            }
        }
    }
}

#[test]
fn items_depend_on_the_seed_and_their_number_alone() {
    for task in &generated() {
        let few = task.examples(asking(2, 1024, 5), &n_tokens).unwrap();
        let again = task.examples(asking(2, 1024, 5), &n_tokens).unwrap();
        assert_eq!(few, again);
        assert_ne!(few[0].context, few[1].context);
        let other = task.examples(asking(2, 1024, 6), &n_tokens).unwrap();
        assert_ne!(few[0].context, other[0].context, "{}", few[0].doc);
        if task.def.name != "passkey" {
            let more = task.examples(asking(3, 1024, 5), &n_tokens).unwrap();
            assert_eq!(few[..], more[..2], "{}", few[0].doc);
        }
    }
}

/// The words that are asked are those that occur most often, by a count of our own.
#[test]
fn counted_words_are_the_most_frequent() {
    for task in generated()
        .iter()
        .filter(|t| ["cwe", "fwe"].contains(&t.def.name.as_str()))
    {
        for e in task.examples(asking(3, 1500, 2), &n_tokens).unwrap() {
            let text = match task.def.name.as_str() {
                // The solved example comes first.
                "cwe" => e.context.rsplit("most often.\n").next().unwrap().to_owned(),
                _ => e.context.split("coded words. ").nth(1).unwrap().to_owned(),
            };
            let mut counts = std::collections::BTreeMap::new();
            for word in text.split_whitespace().filter(|w| !w.ends_with('.')) {
                *counts.entry(word.to_owned()).or_insert(0) += 1;
            }
            let wanted = &e.questions[0].wanted;
            let least = wanted.iter().map(|w| counts[w]).min().unwrap();
            let others = counts.iter().filter(|(w, _)| !wanted.contains(w));
            let most = others.map(|(_, n)| *n).max().unwrap();
            assert!(least > most, "{}: {least} {most}", e.doc);
        }
    }
}

#[test]
fn a_passkey_moves_from_the_first_line_to_the_last() {
    let task = DataRef::task("passkey")
        .unwrap()
        .load_task(&Lookup::default())
        .unwrap();
    let examples = task.examples(asking(5, 800, 1), &n_tokens).unwrap();
    let at: Vec<f64> = examples
        .iter()
        .map(|e| {
            let lines: Vec<&str> = e.context.lines().collect();
            let here = lines.iter().position(|l| l.contains("pass key")).unwrap();
            (here - 1) as f64 / (lines.len() - 2) as f64
        })
        .collect();
    assert_eq!((at[0], at[4]), (0.0, 1.0));
    assert!(at.windows(2).all(|w| w[0] < w[1]), "{at:?}");
    assert_eq!(examples[1].depth, Some(0.25));
}

#[test]
fn a_context_too_short_for_anything_is_refused() {
    for task in &generated() {
        let error = task
            .examples(asking(1, 8, 1), &n_tokens)
            .unwrap_err()
            .to_string();
        assert!(error.contains("raise `length`"), "{error}");
    }
}

#[test]
fn uuids_are_of_version_four() {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let id = words::uuid(&mut rng);
    let parts: Vec<usize> = id.split('-').map(str::len).collect();
    assert_eq!(parts, [8, 4, 4, 4, 12]);
    assert!(
        id[14..].starts_with('4') && "89ab".contains(&id[19..20]),
        "{id}"
    );
}

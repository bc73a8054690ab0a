//! Tests of definitions, items and the border between context and answer.

use super::prompt::prompt;
use super::*;

fn own(dir: &Path, toml: &str, items: &str) -> Result<Task, TaskError> {
    std::fs::write(dir.join("mine.toml"), toml).unwrap();
    std::fs::write(dir.join("items.jsonl"), items).unwrap();
    let data = DataRef::task_file("mine.toml", &dir.join("mine.toml"))?;
    data.load_task(&Lookup::default())
}

const MINE: &str = r#"
schema = 1
name = "mine"
version = 3
doc = "colours"
paper = "none"

[items]
data = "items.jsonl"
format = "jsonl"
context = "Q: {{ q }}\nA:"
choices = "[right, wrong]"
gold = "0"
"#;

const ITEMS: &str = r#"{"q": "sky?", "right": "blue", "wrong": "greenish"}
{"q": "grass?", "right": "green", "wrong": "red"}
{"q": "coal?", "right": "black", "wrong": "white"}
"#;

fn asking(shots: usize, items: usize) -> Asking {
    Asking {
        shots,
        items,
        length: 300,
        seed: 7,
    }
}

#[test]
fn every_definition_of_the_program_is_sound_and_named_by_its_file() {
    for (name, text) in builtin() {
        let def = TaskDef::parse(name, text).unwrap();
        assert_eq!(def.name, *name);
        assert!(def.version >= 1 && !def.doc.is_empty() && !def.paper.is_empty());
        let data = DataRef::task(name).unwrap();
        assert!(data.is_task && data.sha256.len() == 64, "{name}");
    }
}

#[test]
fn shots_come_first_and_are_not_asked() {
    let dir = tempfile::tempdir().unwrap();
    let task = own(dir.path(), MINE, ITEMS).unwrap();
    let examples = task.examples(asking(1, 2), &|t| t.len()).unwrap();
    assert_eq!(examples.len(), 2);
    assert_eq!(examples[0].context, "Q: sky?\nA: blue\n\nQ: grass?\nA:");
    let options = &examples[0].questions[0].options;
    assert_eq!(options[1].target, " red");
    assert_eq!((options[0].n_chars, options[1].n_chars), (5, 3));
    assert_eq!(examples[1].doc, "mine 2");
    let error = task.examples(asking(2, 2), &|t| t.len()).unwrap_err();
    assert!(error.to_string().contains("set data.items to 1"), "{error}");
}

#[test]
fn what_is_wrong_with_a_definition_or_an_item_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let message = |toml: &str, items: &str| {
        own(dir.path(), toml, items)
            .and_then(|t| t.examples(asking(0, 3), &|t| t.len()))
            .unwrap_err()
            .to_string()
    };
    let wrong = message(&MINE.replace("gold = \"0\"", "gold = \"2\""), ITEMS);
    assert!(
        wrong.contains("item 0: 2 choices, 1 contexts, the right one is 2"),
        "{wrong}"
    );
    let wrong = message(&MINE.replace("[right, wrong]", "[right,"), ITEMS);
    assert!(wrong.contains("`[right,`"), "{wrong}");
    let wrong = message(&MINE.replace("doc =", "dok ="), ITEMS);
    assert!(wrong.contains("line 5"), "{wrong}");
    let wrong = message(MINE, &ITEMS.replace("\"green\"", "\"\""));
    assert!(wrong.contains("item 1: choice 0 is empty"), "{wrong}");
    let wrong = message(MINE, &ITEMS.replace("{\"q\": \"coal", "\"q\": \"coal"));
    assert!(wrong.contains("item 2: no JSON"), "{wrong}");
    let wrong = message(&format!("{MINE}contexts = \"[q]\"\n"), ITEMS);
    assert!(wrong.contains("`context`, or `contexts`"), "{wrong}");
    let wrong = DataRef::task("pika").unwrap_err().to_string();
    assert!(wrong.contains("piqa"), "{wrong}");
}

#[test]
fn another_edition_of_the_items_is_another_task() {
    let dir = tempfile::tempdir().unwrap();
    own(dir.path(), MINE, ITEMS).unwrap();
    let data = DataRef::task_file("mine.toml", &dir.path().join("mine.toml")).unwrap();
    std::fs::write(dir.path().join("items.jsonl"), ITEMS.replace("sky", "sea")).unwrap();
    let error = data.load_task(&Lookup::default()).unwrap_err();
    assert!(error.to_string().contains("another edition"), "{error}");
}

/// A tokenizer of words: a space belongs to the word after it; `=>` is one token wherever it stands.
fn encode(text: &str) -> Result<Vec<u32>, std::convert::Infallible> {
    let mut ids = Vec::new();
    let mut word = String::new();
    let mut flush = |word: &mut String| {
        if !word.is_empty() {
            ids.push(
                word.bytes()
                    .fold(7u32, |h, b| h.wrapping_mul(31).wrapping_add(b.into())),
            );
            word.clear();
        }
    };
    for c in text.chars() {
        if (c == ' ' || c == '=') && !word.is_empty() {
            flush(&mut word);
        }
        word.push(c);
        if word == "=>" || c == '\n' {
            flush(&mut word);
        }
    }
    flush(&mut word);
    Ok(ids)
}

fn example(context: &str, options: &[(&str, &str)]) -> Example {
    let options = options.iter().map(|(before, target)| AnswerOption {
        before: (*before).to_owned(),
        target: (*target).to_owned(),
        n_chars: target.len(),
    });
    Example {
        doc: "d".into(),
        depth: None,
        context: context.into(),
        questions: vec![Question {
            options: options.collect(),
            gold: 0,
            wanted: Vec::new(),
        }],
    }
}

/// The last token of the context is the query: it reads the compressed cache and predicts the answer.
#[test]
fn the_contexts_last_token_is_asked_after_the_compression() {
    let asked = example("a b c:", &[("a b c:", " yes"), ("a b c:", " no way")]);
    let got = prompt(&asked, &[9], encode).unwrap().unwrap();
    let whole = encode("a b c: no way").unwrap();
    assert_eq!(got.context, [&[9], &whole[..2]].concat());
    assert_eq!(got.branches[0][1].query, whole[2..3]);
    assert_eq!(got.branches[0][1].target, whole[3..]);
    assert_eq!(got.n_split_borders, 0);
}

/// Options that differ before the answer share what they have in common; a question's own words come after it.
#[test]
fn what_differs_between_options_is_never_compressed() {
    let asked = example("x Sarah", &[("x Sarah", " won"), ("x Maria", " won")]);
    let got = prompt(&asked, &[], encode).unwrap().unwrap();
    assert_eq!(got.context, encode("x").unwrap());
    assert_eq!(got.branches[0][0].query, encode(" Sarah").unwrap());
    assert_eq!(got.branches[0][1].query, encode(" Maria").unwrap());
    assert_eq!(got.branches[0][0].target, got.branches[0][1].target);

    let asked = example("text here\n", &[("text here\nwhat is it?", " this")]);
    let got = prompt(&asked, &[], encode).unwrap().unwrap();
    assert_eq!(got.context, encode("text here\n").unwrap());
    assert_eq!(got.branches[0][0].query, encode("what is it?").unwrap());
}

/// Spaces at the context's end belong to the answer; a token over the border is counted and the context's own are kept.
#[test]
fn borders_inside_tokens_are_counted() {
    let asked = example("a b ", &[("a b ", "c")]);
    let got = prompt(&asked, &[], encode).unwrap().unwrap();
    assert_eq!(got.branches[0][0].target, encode(" c").unwrap());

    let asked = example("a b=", &[("a b=", "> c")]);
    let got = prompt(&asked, &[], encode).unwrap().unwrap();
    assert_eq!(got.n_split_borders, 1);
    assert_eq!(got.branches[0][0].query, encode("=").unwrap());
    assert_eq!(got.branches[0][0].target, encode(" c").unwrap());

    assert_eq!(
        prompt(&example("a", &[("a", "")]), &[], encode).unwrap(),
        None
    );
    assert_eq!(
        prompt(&example("", &[("", "a")]), &[], encode).unwrap(),
        None
    );
}

//! Answers that must not depend on how the work is shared out: threads, tokens of a step, caches in a step.

use std::collections::BTreeMap;

use kvlab::bundle::Contents;
use kvlab::data::{DataRef, Lookup, Network};
use kvlab::eval::records::{AnswerRecord, PerToken};

use super::support::{Bench, model_path};

const STRATEGIES: [&str; 3] = [
    "[[strategy]]\nencode = \"q8_0\"\n",
    "[[strategy]]\npreset = \"int4-best\"\n",
    "[[strategy]]\nencode = \"nvfp4\"\nretain = { method = \"window\", recent = 60, sinks = 4 }\n",
];

/// Tasks that the program makes: four questions on one context, and generated answers. With the items at hand, options too.
fn tasks() -> &'static str {
    let lookup = Lookup {
        data_dir: std::env::var_os("KVLAB_DATA").map(Into::into),
        network: Network::Offline,
    };
    match DataRef::named("arc-easy-test").and_then(|data| data.load(&lookup)) {
        Ok(_) => "\"key_value\", \"passkey\", \"arc_easy\"",
        Err(missing) => {
            eprintln!("SKIPPED, arc_easy needs its items in KVLAB_DATA: {missing}");
            "\"key_value\", \"passkey\""
        }
    }
}

/// What came of each item of each cell, with what was scored token by token.
fn answers(contents: &Contents) -> BTreeMap<(String, usize), (Vec<AnswerRecord>, PerToken)> {
    let items = contents.items.iter();
    items
        .map(|i| {
            let place = (i.cell.clone(), i.item);
            (place, (i.answers.clone(), i.tokens.clone()))
        })
        .collect()
}

#[test]
fn answers_have_the_same_bits_for_threads_chunks_and_company() {
    if model_path().is_none() {
        return;
    }
    let body = |strategies: &str| {
        let tasks = tasks();
        Bench::new(&format!(
            "data = {{ tasks = [{tasks}], items = 1 }}\n\
             protocol = {{ kind = \"tasks\", length = 128, latency = {{ steps = 0 }} }}\n{strategies}"
        ))
    };
    let together = body(&STRATEGIES.concat());
    let run = |results: &str, threads: &str, chunk: &str| {
        let setting = format!("protocol.chunk={chunk}");
        let args = ["--threads", threads, "-s", &setting];
        answers(&together.contents(results, &args))
    };
    let whole = run("whole", "2", "512");
    assert!(whole.len() >= 2 * STRATEGIES.len());
    let options = whole.values().flat_map(|(answers, _)| answers);
    assert!(
        options
            .flat_map(|a| &a.options)
            .any(|o| o.nll != o.nll_reference)
    );
    for (threads, chunk) in [("1", "32"), ("2", "5"), ("1", "1")] {
        let cut = run(chunk, threads, chunk);
        assert!(whole == cut, "{threads} threads, chunks of {chunk}");
    }
    // A strategy alone answers as it does beside others: their rows share each step of the model.
    let alone = answers(&body(STRATEGIES[1]).contents("alone", &["--threads", "2"]));
    assert!(!alone.is_empty());
    for (place, answer) in &alone {
        assert!(whole.get(place) == Some(answer), "{place:?}");
    }
}

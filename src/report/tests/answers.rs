//! Answers in reports: verdicts by hand on rows and pairs, intervals that stay inside.

use super::*;
use crate::bundle::fixture::items;
use crate::eval::records::{AnswerRecord, OptionRecord};
use crate::eval::stats::mcnemar::McNemar;

/// A question of two options, the first right, the second's likelihood 1 nat. `shift`: what the strategy's right option
/// differs by from the reference's 0.5.
fn question(shift: f64) -> AnswerRecord {
    let option = |nll, nll_reference| OptionRecord {
        n_tokens: 2,
        n_chars: 4,
        nll,
        nll_reference,
        is_greedy: false,
        is_greedy_reference: false,
    };
    AnswerRecord {
        gold: 0,
        options: vec![option(0.5 + shift, 0.5), option(1.0, 1.0)],
        generated: None,
    }
}

/// Items of the first text, each with these questions in each of the three cells: `[item][cell][question]`.
fn asked(questions: &[[Vec<f64>; 3]]) -> Report {
    let records: Vec<Vec<ItemRecord>> = questions
        .iter()
        .enumerate()
        .map(|(i, shifts)| {
            let mut records = items(0, 0);
            for (record, shifts) in records.iter_mut().zip(shifts) {
                record.item = i;
                record.doc = format!("doc-{i}");
                record.answers = shifts.iter().map(|&shift| question(shift)).collect();
            }
            records
        })
        .collect();
    let dir = tempfile::tempdir().unwrap();
    write(bundle(dir.path(), &records, &[]).path()).unwrap()
}

/// 40 questions: f32 and q8_0 have the reference's likelihoods to the bit, q4_0 loses 15 and has the others 0.1 nat off.
/// McNemar's p is 2 · 2⁻¹⁵, times 1 row in the table of rows and times 2 in that of pairs.
#[test]
fn a_against_a_is_equivalent_and_lost_answers_are_worse() {
    let of = |i: usize| [vec![0.0], vec![0.0], vec![if i < 15 { 1.0 } else { 0.1 }]];
    let report = asked(&(0..40).map(of).collect::<Vec<_>>());
    let p = 2f64.powi(-14);
    for label in ["f32", "q8_0"] {
        let scores = row(&report, "essays", label).scores().unwrap();
        assert_eq!(scores.judged().verdict, Verdict::Equivalent);
        assert_eq!(
            (scores.comparison().p, scores.judged().p_holm),
            (Some(1.0), Some(1.0))
        );
    }
    let scores = row(&report, "essays", LABELS[2]).scores().unwrap();
    assert_eq!(scores.judged().verdict, Verdict::Worse);
    close(scores.comparison().p.unwrap(), p);
    close(scores.judged().p_holm.unwrap(), p);
    let answers = &scores.accuracy.as_ref().unwrap().paired;
    assert_eq!(
        (answers.n_questions, answers.n_only_a, answers.n_only_b),
        (40, 0, 15)
    );
    close(answers.comparison.delta.value, -15.0 / 40.0);
    close(answers.gold_delta_nll.value, (15.0 + 25.0 * 0.1) / 80.0);

    let told: Vec<String> = report.groups[0]
        .pairs
        .iter()
        .map(|pair| format!("{} is {} than {}", pair.a, pair.judged(), pair.b))
        .collect();
    let lossy = LABELS[2];
    assert_eq!(
        told,
        [
            "f32 is equivalent than q8_0".to_owned(),
            format!("f32 is better than {lossy}"),
            format!("q8_0 is better than {lossy}"),
        ]
    );
    let pairs = &report.groups[0].pairs;
    assert_eq!(
        (pairs[0].comparison().p, pairs[0].judged().p_holm),
        (Some(1.0), Some(1.0))
    );
    close(pairs[1].comparison().p.unwrap(), p);
    close(pairs[1].judged().p_holm.unwrap(), 2.0 * p);
    let text = markdown::pairs(&report);
    assert!(text.contains("| +38 [20, 52] | 15/0 "), "{text}");
    assert!(text.contains("| 6.1e-5 | 0.00012  | 40 |"), "{text}");
    assert!(!text.contains("ΔPPL"), "{text}");
    let line = csv::pairs(&report).lines().nth(2).unwrap().to_owned();
    assert!(
        line.contains(",40,0.375,") && line.ends_with(",items"),
        "{line}"
    );
}

/// The same answers by other likelihoods are a test: 40 questions can't show that accuracies are within a point.
#[test]
fn equal_answers_of_unequal_likelihoods_are_not_yet_equivalent() {
    let of = |i: usize| [vec![0.0], vec![0.01 * (i % 3) as f64], vec![0.6]];
    let few = asked(&(0..40).map(of).collect::<Vec<_>>());
    let judged = *row(&few, "essays", "q8_0").scores().unwrap().judged();
    assert_eq!(
        (judged.verdict, judged.p_holm),
        (Verdict::NotDistinguishable, Some(1.0))
    );
    let many = asked(&(0..800).map(of).collect::<Vec<_>>());
    let judged = *row(&many, "essays", "q8_0").scores().unwrap().judged();
    assert_eq!(judged.verdict, Verdict::Equivalent);
}

/// Four questions on each of five contexts: a cluster each, so that p is not McNemar's; ends stay inside 0 and 100 %.
#[test]
fn questions_on_one_context_are_a_cluster() {
    let lost = |i: usize| {
        (0..4)
            .map(|q| if q < 4 - i.min(2) { 1.0 } else { 0.1 })
            .collect()
    };
    let of = |i: usize| [vec![0.0; 4], vec![0.001; 4], lost(i)];
    let report = asked(&(0..5).map(of).collect::<Vec<_>>());
    let accuracy = |label| {
        row(&report, "essays", label)
            .scores()
            .unwrap()
            .accuracy
            .unwrap()
    };
    let (all, few) = (accuracy("q8_0"), accuracy(LABELS[2]));
    // 0 1 2 2 2 of 4 right.
    close(few.acc.value.value, 7.0 / 20.0);
    close(few.acc.delta.value, -13.0 / 20.0);
    let found = few.paired.comparison;
    let single = McNemar::exact(&[true; 20], &[false; 20]).unwrap();
    assert!(
        found.p.unwrap() > single.p && found.p.unwrap() < 0.05,
        "{found:?}"
    );
    for rate in [all.acc, few.acc, few.acc_norm.unwrap()] {
        let (low, high) = rate.value.interval.unwrap();
        assert!(0.0 <= low && low < high && high <= 1.0, "{rate:?}");
        let (low, high) = rate.delta.interval.unwrap();
        assert!((-1.0..=1.0).contains(&low) && (-1.0..=1.0).contains(&high));
    }
    // Five contexts all right count as five questions: Wilson's low end is 5/(5 + z²).
    let (low, high) = all.acc.value.interval.unwrap();
    close(high, 1.0);
    assert!((low - 0.565_5).abs() < 1e-4, "{low}");
}

/// In each of three contexts one question lost and one gained: no spread over contexts, and yet 6 of 12 answers differ.
#[test]
fn contexts_that_lose_what_they_gain_are_not_equivalent() {
    let of = |_| {
        [
            vec![0.0; 4],
            vec![1.0, 0.0, 0.1, 0.1],
            vec![0.0, 1.0, 0.1, 0.1],
        ]
    };
    let report = asked(&(0..3).map(of).collect::<Vec<_>>());
    let pair = &report.groups[0].pairs[2];
    assert_eq!((pair.a.as_str(), pair.b.as_str()), ("q8_0", LABELS[2]));
    let answers = pair.answers.unwrap();
    assert_eq!((answers.n_only_a, answers.n_only_b), (3, 3));
    let (low, high) = answers.comparison.delta.interval.unwrap();
    // Bonett and Price's: p = q = 4/14, ± 1.959964 · √(8/14/14).
    assert!(
        (high - 0.395_97).abs() < 1e-4 && (low + high).abs() < 1e-12,
        "{high}"
    );
    assert_eq!(
        (pair.comparison().p, pair.judged().verdict),
        (Some(1.0), Verdict::NotDistinguishable)
    );
}

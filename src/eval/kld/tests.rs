//! The packing by hand, files that are refused, and a model against its own file.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::packed::{PackedRow, log_sum_exp, pack, row_words};
use super::*;
use crate::compute::cpu::Cpu;
use crate::model::geometry::geometry;
use crate::model::tiny::{TinyConfig, TinyModel};
use crate::model::transformer::Transformer;

fn packed(logits: &[f32]) -> Vec<u16> {
    let mut words = vec![0xabcd; row_words(logits.len())];
    pack(logits, &mut words);
    words
}

#[test]
fn a_row_is_packed_as_the_format_says() {
    // Three tokens: one word of padding; −20 lies below the span of 16 nats.
    let words = packed(&[0.0, -1.0, -20.0]);
    assert_eq!(words.len(), 2 * 2 + 4);
    let number = |i: usize| f32::from_bits(u32::from(words[i]) | u32::from(words[i + 1]) << 16);
    assert_eq!(number(0), 16.0f32 / 65535.0);
    let log_sum = (1.0 + (-1.0f64).exp() + (-20.0f64).exp()).ln();
    assert!((f64::from(number(2)) - (-16.0 - log_sum)).abs() < 1e-6);
    // 15 / 16 · 65535 = 61439.06.
    assert_eq!(words[4..], [65535, 61439, 0, 0]);
    let row = PackedRow::new(&words, 3);
    assert_eq!((row.top(), row.fault()), (0, None));
    assert!((f64::from(row.log_prob(1)) - (-1.0 - log_sum)).abs() < 2e-4);
    // A span below 16 nats is used whole.
    let words = packed(&[2.0, 1.0]);
    assert_eq!((words.len(), &words[4..]), (6, &[65535u16, 0][..]));
    // Equal logits have no step.
    let words = packed(&[3.0; 4]);
    assert_eq!((words[0], words[1], &words[4..]), (0, 0, &[0u16; 4][..]));
    let row = PackedRow::new(&words, 4);
    assert!((f64::from(row.log_prob(3)) + 4f64.ln()).abs() < 1e-6);
    assert_eq!((row.top(), row.fault()), (0, None));
}

#[test]
fn a_pair_is_what_two_distributions_say() {
    let (base, other) = ([0.0f32, -1.0, -3.0], [-0.5f32, 0.5, -2.0]);
    let words = packed(&base);
    let pair = Pair::of(&other, PackedRow::new(&words, 3), 1);
    let log_probs = |x: &[f32; 3]| x.map(|v| f64::from(v) - log_sum_exp(x, 0.0));
    let (p, q) = (log_probs(&base), log_probs(&other));
    let kld: f64 = p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum();
    assert!((pair.kld - kld).abs() < 1e-4, "{} {kld}", pair.kld);
    assert!((pair.nll + q[1]).abs() < 1e-9 && (pair.nll_base + p[1]).abs() < 1e-4);
    assert!((pair.p_difference() - (q[1].exp() - p[1].exp())).abs() < 1e-4);
    assert!(!pair.same_top);
}

/// Means, errors and percentiles of twelve tokens, worked out apart.
#[test]
fn statistics_are_those_of_the_definitions() {
    let pairs: Vec<Pair> = (0..12)
        .map(|i| Pair {
            nll: 2.0 + 0.25 * f64::from(i % 4),
            nll_base: 2.0 + 0.125 * f64::from(i % 3),
            kld: 0.01 * f64::from(i),
            same_top: i != 5,
        })
        .collect();
    let s = Statistics::of(&pairs).expect("tokens");
    assert_eq!(s.n_tokens, 12);
    assert!((s.ppl.value - 2.375f64.exp()).abs() < 1e-12);
    assert!((s.ln_ppl_ratio.value - (2.375 - 2.125)).abs() < 1e-12);
    // Var = 5/64 over 12 tokens, and 1/96; the two are independent by construction.
    let (a, b) = ((5.0f64 / 64.0 / 11.0).sqrt(), (1.0f64 / 96.0 / 11.0).sqrt());
    assert!((s.ppl.stderr - 2.375f64.exp() * a).abs() < 1e-12);
    assert!((s.ln_ppl_ratio.stderr - a.hypot(b)).abs() < 1e-9);
    assert!(s.correlation.abs() < 1e-9);
    assert!((s.kld.value - 0.055).abs() < 1e-12);
    assert_eq!((s.kld_ranks.max, s.kld_ranks.min), (0.11, 0.0));
    let at = |f: f64| s.kld_ranks.percentiles.iter().find(|p| p.0 == f).unwrap().1;
    assert!((at(0.5) - 0.055).abs() < 1e-12 && (at(0.9) - 0.099).abs() < 1e-12);
    assert!((s.same_top.value - 11.0 / 12.0).abs() < 1e-12);
    assert!((s.same_top.stderr - (11.0f64 / 144.0 / 11.0).sqrt()).abs() < 1e-12);
    assert!(Statistics::of(&[]).is_none());
}

/// A small file: 2 chunks of 5 tokens (2 rows each), 3 tokens in the vocabulary.
fn small_file(dir: &Path) -> (PathBuf, Vec<u8>) {
    let header = Header {
        n_ctx: 5,
        n_vocab: 3,
        n_chunks: 2,
    };
    let path = dir.join("small.kld");
    let ids = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0];
    let mut writer = LogitsWriter::create(&path, header, &ids).expect("creates");
    for i in 0..4 {
        assert!(!path.exists(), "not before it is whole");
        writer.push(&[0.0, -1.0, i as f32]).expect("writes");
    }
    writer.finish().expect("finishes");
    let bytes = std::fs::read(&path).expect("reads");
    assert_eq!(bytes.len() as u64, header.file_bytes());
    assert_eq!(bytes.len(), 8 + 12 + 10 * 4 + 4 * 8 * 2);
    (path, bytes)
}

#[test]
fn a_file_reads_as_it_was_written() {
    let dir = tempfile::tempdir().expect("a folder");
    let (path, bytes) = small_file(dir.path());
    assert_eq!(&bytes[..8], b"_logits_");
    assert_eq!(bytes[8..20], [5, 0, 0, 0, 3, 0, 0, 0, 2, 0, 0, 0]);
    let mut reader = LogitsReader::open(&path).expect("opens");
    assert_eq!(reader.tokens(1), [2, 0, 1, 2, 0]);
    let (mut rows, mut tops) = (PackedRows::default(), Vec::new());
    while reader.next_rows(&mut rows).expect("reads") {
        tops.extend([0, 1].map(|i| rows.row(i).top()));
    }
    assert_eq!(tops, [0, 2, 2, 2]);
    // What is missing is no file.
    let header = reader.header();
    let short = dir.path().join("short.kld");
    let writer = LogitsWriter::create(&short, header, &[0; 10]).expect("creates");
    let error = writer.finish().expect_err("no rows").to_string();
    assert!(
        error.contains("0 rows were written, 4 were announced"),
        "{error}"
    );
    assert!(!short.exists());
}

#[test]
fn damaged_files_are_refused_with_what_was_found() {
    let dir = tempfile::tempdir().expect("a folder");
    let (path, good) = small_file(dir.path());
    let refused = |change: &dyn Fn(&mut Vec<u8>)| -> String {
        let mut bytes = good.clone();
        change(&mut bytes);
        std::fs::write(&path, bytes).expect("writes");
        let read = || -> Result<(), LogitsFileError> {
            let mut reader = LogitsReader::open(&path)?;
            let mut rows = PackedRows::default();
            while reader.next_rows(&mut rows)? {}
            Ok(())
        };
        read().expect_err("damaged").to_string()
    };
    let last = good.len() - 1;
    let first_row = 20 + 40;
    type Change<'a> = (&'a dyn Fn(&mut Vec<u8>), &'a str);
    let changes: [Change<'_>; 10] = [
        (
            &|b| b[0] = b'G',
            "begins with \"Glogits_\", must begin with \"_logits_\"",
        ),
        (&|b| b.truncate(4), "begins with \"_log\""),
        (&|b| b.truncate(12), "can't read the header of"),
        (&|b| b[8] = 2, "n_ctx is 2, must be from 3 to 16777216"),
        (&|b| b[15] = 0x80, "n_vocab is -2147483645, must be from 1"),
        (&|b| b[16] = 0, "n_chunk is 0"),
        (
            &|b| b.truncate(last),
            "has 123 bytes, 2 chunks of 5 tokens take 124: 1 of them are whole",
        ),
        (&|b| b.push(0), "has 125 bytes"),
        (&|b| b[24] = 3, "token 1 has id 3, must be from 0 to 2"),
        (
            &|b| b[first_row + 16 + 3] = 0xbf,
            "chunk 0, row 1: its step is -",
        ),
    ];
    for (change, told) in changes {
        let error = refused(change);
        assert!(error.contains(told), "{told}: {error}");
    }
    let error = refused(&|b| b[first_row + 7] = 0x40);
    assert!(error.contains("its least log-probability is"), "{error}");
    assert!(LogitsReader::open(&dir.path().join("none")).is_err());
}

#[test]
fn texts_and_models_must_fit() {
    let header = cut(1100, 512, 256, None).expect("two chunks");
    assert_eq!(
        (header.n_chunks, header.first_scored(), header.n_scored()),
        (2, 256, 255)
    );
    assert_eq!(cut(9000, 512, 256, Some(3)).expect("fits").n_chunks, 3);
    assert_eq!(cut(11, 5, 256, None).expect("odd").n_scored(), 2);
    let told = |r: Result<(), KldError>| r.expect_err("refused").to_string();
    assert!(told(cut(1000, 512, 256, None).map(|_| ())).contains("two chunks of 512 take 1024"));
    assert!(told(check(header, 255, 4096)).contains("256 tokens, the model one of 255"));
    assert!(told(check(header, 256, 511)).contains("the model's context is 511"));
}

#[test]
fn a_strategy_against_its_own_file_has_only_the_packing_s_error() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("tiny.kld");
    let source = TinyModel::new(&TinyConfig::default());
    let model = Transformer::<Cpu>::load(Arc::new(source)).expect("loads");
    let geometry = geometry(model.spec(), 128);
    let evaluator = Evaluator {
        model: &model,
        materials: Materials {
            geometry: &geometry,
            calibration: None,
            backing_dir: None,
        },
    };
    let ids: Vec<u32> = (0..200).map(|i| i * i % 251).collect();
    let header = cut(ids.len(), 60, 256, None).expect("three chunks");
    let strategies = ["f32", "q8_0", "q4_0"].map(Strategy::bare);
    let mut n_done = 0;
    let ppl = evaluator
        .write(&strategies[0], (&path, header), &ids, &mut || n_done += 1)
        .expect("writes");
    assert_eq!(n_done, 3);
    let mut reader = LogitsReader::open(&path).expect("opens");
    let all = evaluator.compare(&strategies, &mut reader, usize::MAX, &mut || n_done += 1);
    let all = all.expect("compares");
    assert_eq!(n_done, 3 + 9);
    let [exact, q8_0, q4_0] = &all[..] else {
        panic!("three strategies");
    };
    assert_eq!(exact.len(), 3 * 29);
    let of = |pairs: &[Pair]| Statistics::of(pairs).expect("tokens");
    let s = of(exact);
    assert!((s.ppl.value - ppl).abs() < 1e-9 * ppl);
    assert!((s.ppl_ratio.value - 1.0).abs() < 1e-4, "{:?}", s.ppl_ratio);
    // What 16 bits lose: both signs, far below any strategy.
    assert!(s.kld.value.abs() < 1e-5, "{:?}", s.kld);
    assert!(s.same_top.value > 0.95);
    assert!(s.kld.value.abs() < of(q8_0).kld.value && of(q8_0).kld.value < of(q4_0).kld.value);
}

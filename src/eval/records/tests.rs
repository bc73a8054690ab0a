//! Records: to the bit through JSON, and every contradiction named.

use super::*;

fn record() -> ItemRecord {
    let tokens = PerToken {
        nll: vec![1.5, 2.25, 0.1],
        nll_reference: vec![1.4, 2.25, 0.2],
        kld: vec![0.01, 0.0, 1e-30],
        delta_p: vec![-0.02, 0.0, 0.5],
    };
    let sum = |v: &[f32]| v.iter().map(|&x| f64::from(x)).sum::<f64>();
    ItemRecord {
        cell: "c0".into(),
        item: 3,
        doc: "a".into(),
        domain: "prose".into(),
        n_scored: 3,
        bytes_text: 14,
        nll: sum(&tokens.nll),
        nll_reference: sum(&tokens.nll_reference),
        nll_floor: Some(9.0),
        kld_sum: sum(&tokens.kld),
        top1_agree: 2,
        delta_p_sum: sum(&tokens.delta_p),
        delta_p_sq_sum: tokens.delta_p.iter().map(|&x| f64::from(x).powi(2)).sum(),
        tokens,
        memory: vec![MemoryRecord {
            n_tokens: 4,
            report: MemoryReport {
                payload_bytes: 7,
                ..MemoryReport::default()
            },
        }],
        memory_track: Vec::new(),
        layers: Vec::new(),
        latency: Some(LatencyRecord {
            depth: 4,
            step_ms: vec![0.1 + 0.2],
            cpu_ms: 1.0 / 3.0,
            attend_ms: 0.1,
            prefill_ms: 2.0,
            compress_ms: 0.0,
            repetition_ms: Some(0.0),
        }),
        traffic: None,
        answers: Vec::new(),
        text: None,
        effective: BTreeMap::from([("chunk".into(), "512".into())]),
    }
}

#[test]
fn round_trips_to_the_bit() {
    let mut kept = record();
    kept.tokens.nll = vec![f32::MIN_POSITIVE, -0.0, f32::MAX];
    kept.nll = f64::from_bits(0x3fb9_9999_9999_999a);
    let text = serde_json::to_string(&kept).unwrap();
    let back: ItemRecord = serde_json::from_str(&text).unwrap();
    assert_eq!(serde_json::to_string(&back).unwrap(), text);
    assert_eq!(back.nll.to_bits(), kept.nll.to_bits());
    assert_eq!(back.tokens.nll[1].to_bits(), (-0.0f32).to_bits());
    assert_eq!(back, kept);
    assert!(text.contains("\"AACAAAAAAID//39/\""), "{text}");
}

#[test]
fn a_broken_list_is_refused() {
    let text = serde_json::to_string(&record()).unwrap();
    let cut = text.replace("\"kld\":\"", "\"kld\":\"AAAA");
    let error = serde_json::from_str::<ItemRecord>(&cut).unwrap_err();
    assert!(error.to_string().contains("15 bytes"), "{error}");
}

#[test]
fn check_names_each_fault() {
    record().check().unwrap();
    let mut bad = record();
    bad.nll = f64::NAN;
    assert!(bad.check().unwrap_err().to_string().contains("nll is NaN"));
    let mut bad = record();
    bad.tokens.kld.pop();
    assert!(matches!(
        bad.check().unwrap_err(),
        RecordError::Length {
            got: 2,
            expected: 3,
            ..
        }
    ));
    let mut bad = record();
    bad.delta_p_sq_sum *= 1.001;
    assert!(matches!(
        bad.check().unwrap_err(),
        RecordError::Sum {
            field: "delta_p_sq_sum",
            ..
        }
    ));
    let mut bad = record();
    bad.top1_agree = 4;
    assert!(matches!(
        bad.check().unwrap_err(),
        RecordError::Count { .. }
    ));
}

#[test]
fn identical_means_every_token() {
    let mut same = record();
    assert!(!same.is_identical_to_reference());
    same.tokens.nll = same.tokens.nll_reference.clone();
    same.nll = same.nll_reference;
    (same.kld_sum, same.delta_p_sq_sum, same.top1_agree) = (0.0, 0.0, 3);
    assert!(same.is_identical_to_reference());
}

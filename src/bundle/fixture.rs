//! Synthetic runs for tests: exact small numbers, no model.

use std::collections::BTreeMap;

use super::environment::{Engine, Environment};
use super::header::{
    Bos, CellHeader, Cut, DataHeader, GeometryHeader, LayerHeader, ModelHeader, ProtocolHeader,
    ProtocolKind, RunHeader, SCHEMA,
};
use crate::cache::strategy::{Strategy, Tail};
use crate::cache::{Continuation, MemoryReport};
use crate::eval::records::{
    CellRecord, CellStatus, ItemRecord, LatencyRecord, MemoryRecord, PerToken,
};

/// Items of each data set.
pub const N_ITEMS: usize = 3;
/// Strategies: exact, two lossy ones, and one whose cells fail.
pub const LABELS: [&str; 4] = ["f32", "q8_0", "q4_0 tail 32", "broken"];
/// Scored tokens of item i: 4 + i.
const FIRST_SCORED: usize = 4;
const DATA: [(&str, &str); 2] = [("essays", "prose"), ("sources", "code")];

/// An environment that no machine has.
pub fn environment(executable: &str) -> Environment {
    Environment {
        engine: Engine {
            kvlab_version: "0.0.0".into(),
            executable_sha256: executable.into(),
            arch: "abacus".into(),
            cpu_flags: vec!["beads".into()],
        },
        rustc: None,
        source_commit: None,
        command: vec!["kvlab".into(), "run".into()],
        started_at: "2000-01-01T00:00:00Z".into(),
        os: "none".into(),
        cpu_model: None,
        n_cores: 1,
        memory_bytes: None,
        load_average: None,
    }
}

/// Two texts, four strategies, `compress-once` with 16 + up to 6 tokens.
pub fn header() -> RunHeader {
    let strategies = [
        Strategy::bare("f32"),
        Strategy::bare("q8_0"),
        Strategy {
            label: LABELS[2].into(),
            tail: Tail::both(32),
            sinks: 4,
            ..Strategy::bare("q4_0")
        },
        Strategy {
            label: LABELS[3].into(),
            ..Strategy::bare("q4_0")
        },
    ];
    let cells = DATA.iter().enumerate().flat_map(|(d, (data, _))| {
        strategies
            .iter()
            .enumerate()
            .map(move |(s, strategy)| CellHeader {
                id: format!("c{d}{s}"),
                label: strategy.label.clone(),
                strategy: strategy.clone(),
                data: (*data).into(),
                protocol: "once".into(),
                seed: 7,
            })
    });
    RunHeader {
        schema: SCHEMA,
        experiment: "synthetic".into(),
        plan_hash: "0123abcd4567".into(),
        model: ModelHeader {
            name: "abacus-1b".into(),
            sha256: "feedface00112233".into(),
            arithmetic: Default::default(),
        },
        geometry: GeometryHeader {
            layers: vec![
                LayerHeader {
                    scalars_per_token: 64,
                    window: None
                };
                2
            ],
        },
        protocols: vec![ProtocolHeader {
            name: "once".into(),
            kind: ProtocolKind::CompressOnce {
                context: 16,
                scored: 6,
                continuation: Continuation::Strategy,
            },
            bos: Bos::None,
        }],
        data: DATA
            .iter()
            .map(|(name, _)| DataHeader {
                name: (*name).into(),
                sha256: format!("{:x<16}", &name[..1]),
                cuts: vec![Cut {
                    protocol: "once".into(),
                    n_items: N_ITEMS,
                    n_tokens_dropped: 5,
                    skipped: Vec::new(),
                    n_split_borders: 0,
                }],
            })
            .collect(),
        cells: cells.collect(),
    }
}

/// The records of one item in all cells of data set `d` that do not fail: what one append holds.
pub fn items(d: usize, item: usize) -> Vec<ItemRecord> {
    (0..LABELS.len() - 1).map(|s| record(d, s, item)).collect()
}

/// Every append of the run, in order, with the ends of the cells.
pub fn all_items() -> Vec<Vec<ItemRecord>> {
    (0..DATA.len())
        .flat_map(|d| (0..N_ITEMS).map(move |item| items(d, item)))
        .collect()
}

/// How the cells end.
pub fn ends() -> Vec<CellRecord> {
    header()
        .cells
        .iter()
        .map(|cell| CellRecord {
            id: cell.id.clone(),
            status: if cell.label == LABELS[3] {
                CellStatus::Failed {
                    message: "non-finite K at layer 1, KV head 0, position 7".into(),
                }
            } else {
                CellStatus::Done
            },
            n_skipped: 0,
            wall_s: 1.5,
        })
        .collect()
}

fn record(d: usize, s: usize, item: usize) -> ItemRecord {
    let n_scored = FIRST_SCORED + item;
    // Errors in eighths, so that sums are exact: 0, 1/64 and 1/8 nat with a spread over items and tokens.
    let error = [0.0, 1.0 / 64.0, 0.125][s];
    let value = |i: usize| 2.0 + (i % 4) as f32 * 0.25 + d as f32 * 0.5;
    let wobble = |i: usize| error * (1.0 + (i + item) as f32 * 0.25);
    let list = |f: &dyn Fn(usize) -> f32| (0..n_scored).map(f).collect::<Vec<f32>>();
    let sum = |v: &[f32]| v.iter().map(|&x| f64::from(x)).sum::<f64>();
    let tokens = PerToken {
        nll: list(&|i| value(i) + wobble(i)),
        nll_reference: list(&value),
        kld: list(&|i| wobble(i) * 0.5),
        delta_p: list(&|i| -wobble(i) * 0.25),
    };
    ItemRecord {
        cell: format!("c{d}{s}"),
        item,
        doc: format!("doc-{item}"),
        domain: DATA[d].1.into(),
        n_scored,
        bytes_text: 4 * n_scored,
        nll: sum(&tokens.nll),
        nll_reference: sum(&tokens.nll_reference),
        nll_floor: Some(sum(&tokens.nll_reference) + n_scored as f64 * 0.5),
        kld_sum: sum(&tokens.kld),
        top1_agree: n_scored - s.min(1 + item % 2),
        delta_p_sum: sum(&tokens.delta_p),
        delta_p_sq_sum: tokens.delta_p.iter().map(|&x| f64::from(x).powi(2)).sum(),
        tokens,
        memory: [8, 16].iter().map(|&n| memory(s, n)).collect(),
        memory_track: if item == 0 {
            (8..=16).step_by(4).map(|n| memory(s, n)).collect()
        } else {
            Vec::new()
        },
        layers: Vec::new(),
        latency: Some(LatencyRecord {
            depth: 16,
            step_ms: vec![2.0 + s as f64, 2.5 + s as f64, 3.0 + item as f64],
            cpu_ms: 7.0,
            attend_ms: 3.0,
            prefill_ms: 32.0,
            compress_ms: 1.0,
            repetition_ms: (s == 1).then_some(4.0),
        }),
        traffic: None,
        answers: Vec::new(),
        text: None,
        effective: BTreeMap::from([("chunk".into(), "4".into())]),
    }
}

fn memory(s: usize, n_tokens: usize) -> MemoryRecord {
    let n = n_tokens as u64;
    let (payload, scale, exact) = [
        (0, 0, 512 * n),
        (128 * n, 8 * n, 0),
        (64 * (n - 4), 8 * (n - 4), 4 * 256),
    ][s];
    MemoryRecord {
        n_tokens,
        report: MemoryReport {
            payload_bytes: payload,
            scale_bytes: scale,
            exact_bytes: exact,
            page_table_bytes: 48,
            slack_bytes: 16,
            scratch_bytes: 4096,
            rows_live: 4 * n,
            rows_seen: 4 * n,
            ..MemoryReport::default()
        },
    }
}

//! Scores by the attention that rows got from queries of the context: `snapkv`, `adakv`, `pyramid`, `h2o`, `tova`.
//!
//! `snapkv`: the mean over the newest `window` queries, smoothed over `kernel` neighbours, the mean over a group's query
//! heads; the window itself lives. `adakv` and `pyramid` are the same scores under other allocations, as published.
//! `h2o`: the sum over all queries, over how many of them saw the row. `tova`: the newest query, the mean over all query
//! heads of the layer.
//!
//! All of them see what the context's own queries looked for: when a question comes later, they can't know it.

use super::super::Needs;
use super::super::stage::{
    ContextLayer, ContextNeeds, Domain, Kind, ParamDef, Params, StageDef, Tolerance, never,
};
use super::attention::weights;
use super::budget::{
    ALLOCATE, ALLOCATE_ADAKV, ALLOCATE_PYRAMID, BETA, BYTES, BYTES_PER_TOKEN, COMMON,
    KEPT_FRACTION, RECENT, SAFEGUARD, SEGMENTS, SINKS, TOKENS, WHITELIST,
};
use super::positions;
use super::selection::{Score, Selection};

const WINDOW: ParamDef = ParamDef {
    name: "window",
    domain: Domain::Int {
        min: 1,
        max: 65_536,
    },
    default: Some("64"),
    doc: "newest tokens whose queries are asked; they live themselves",
};

const KERNEL: ParamDef = ParamDef {
    name: "kernel",
    domain: Domain::Int { min: 1, max: 1023 },
    default: Some("5"),
    doc: "neighbours over which scores are averaged; odd",
};

/// The registry entries.
pub const SNAPKV: StageDef = StageDef {
    name: "snapkv",
    kind: Kind::Retain,
    doc: "rows that the newest queries attend to",
    paper: "SnapKV, arXiv 2404.14469, pooled by the mean as in kvpress",
    params: &[
        TOKENS,
        KEPT_FRACTION,
        BYTES,
        BYTES_PER_TOKEN,
        ALLOCATE,
        SAFEGUARD,
        BETA,
        SINKS,
        RECENT,
        WHITELIST,
        SEGMENTS,
        WINDOW,
        KERNEL,
    ],
    calibrated: never,
    examples: &["{ method = \"snapkv\", kept_fraction = 0.5, window = 32 }"],
    tolerance: Tolerance::Exact,
    build: |params, _| snap("snapkv", params),
};

/// `snapkv` whose heads share a layer's budget.
pub const ADAKV: StageDef = StageDef {
    name: "adakv",
    doc: "snapkv with a budget that the heads of a layer share",
    paper: "Ada-KV, arXiv 2407.11550",
    params: &[
        TOKENS,
        KEPT_FRACTION,
        BYTES,
        BYTES_PER_TOKEN,
        ALLOCATE_ADAKV,
        SAFEGUARD,
        BETA,
        SINKS,
        RECENT,
        WHITELIST,
        SEGMENTS,
        WINDOW,
        KERNEL,
    ],
    examples: &["{ method = \"adakv\", kept_fraction = 0.5, window = 32 }"],
    build: |params, _| snap("adakv", params),
    ..SNAPKV
};

/// `snapkv` with more rows for early layers.
pub const PYRAMID: StageDef = StageDef {
    name: "pyramid",
    doc: "snapkv with budgets that fall from layer to layer",
    paper: "PyramidKV, arXiv 2406.02069",
    params: &[
        TOKENS,
        KEPT_FRACTION,
        BYTES,
        BYTES_PER_TOKEN,
        ALLOCATE_PYRAMID,
        SAFEGUARD,
        BETA,
        SINKS,
        RECENT,
        WHITELIST,
        SEGMENTS,
        WINDOW,
        KERNEL,
    ],
    examples: &["{ method = \"pyramid\", kept_fraction = 0.5, window = 32 }"],
    build: |params, _| snap("pyramid", params),
    ..SNAPKV
};

/// Attention of all queries.
pub const H2O: StageDef = StageDef {
    name: "h2o",
    kind: Kind::Retain,
    doc: "rows that all queries so far attend to most, over how many saw them",
    paper: "H2O, arXiv 2306.14048, with the mean over the queries that saw a row",
    params: COMMON,
    calibrated: never,
    examples: &["{ method = \"h2o\", kept_fraction = 0.5, recent = 16 }"],
    tolerance: Tolerance::Exact,
    build: |params, _| Selection::stage("h2o", params, 0, Observed::All),
};

/// Attention of the newest query.
pub const TOVA: StageDef = StageDef {
    name: "tova",
    kind: Kind::Retain,
    doc: "rows that the newest query attends to, over the heads of a layer together",
    paper: "Transformers are Multi-State RNNs (TOVA), arXiv 2401.06104",
    params: COMMON,
    calibrated: never,
    examples: &["{ method = \"tova\", kept_fraction = 0.5, recent = 1 }"],
    tolerance: Tolerance::Exact,
    build: |params, _| Selection::stage("tova", params, 0, Observed::Newest),
};

fn snap(name: &str, params: &Params) -> Result<super::Stage, super::StageError> {
    let (window, kernel) = (positions(params, "window"), positions(params, "kernel"));
    if kernel.is_multiple_of(2) {
        return Err(super::StageError::Parameter {
            kind: Kind::Retain,
            name: name.to_owned(),
            problem: format!(
                "`kernel` is {kernel}: it must be odd, so that as many neighbours count on either side"
            ),
        });
    }
    let score = Observed::Window {
        window: window as usize,
        kernel: kernel as usize,
    };
    Selection::stage(name, params, window, score)
}

/// Whose attention counts.
pub enum Observed {
    /// That of the newest queries, smoothed.
    Window {
        /// Newest queries.
        window: usize,
        /// Neighbours averaged.
        kernel: usize,
    },
    /// That of all queries.
    All,
    /// That of the newest query, by all heads.
    Newest,
}

impl Score for Observed {
    fn needs(&self) -> Needs {
        let queries = match self {
            Observed::Window { window, .. } => *window,
            Observed::All => usize::MAX,
            Observed::Newest => 1,
        };
        Needs {
            context: ContextNeeds {
                rows: true,
                queries,
                repetition: false,
            },
            ..Needs::default()
        }
    }

    fn context(&self, context: ContextLayer<'_>) -> Vec<Vec<f32>> {
        let g = context.geometry;
        let n = context.n_tokens;
        let n_queries = context.seen.q.len() / (g.n_heads * g.head_dim);
        // Another strategy may have asked for more queries.
        let first_query = match self {
            Observed::Window { window, .. } => n.saturating_sub(*window),
            Observed::All => 0,
            Observed::Newest => n.saturating_sub(1),
        };
        let mut sums = vec![vec![0.0f32; n]; g.n_kv_heads];
        let skipped = first_query.saturating_sub(n - n_queries) * g.n_heads * g.head_dim;
        let mut asked = context;
        asked.seen.q = &context.seen.q[skipped..];
        weights(&asked, |w| {
            for (s, x) in sums[w.kv_head][w.first..].iter_mut().zip(w.weights) {
                *s += x;
            }
        });
        match self {
            Observed::Window { kernel, .. } => {
                // The window lives; what it looks at in itself is no neighbour's merit.
                sums.iter_mut().for_each(|s| s[first_query..].fill(0.0));
                sums.iter().map(|s| smoothed(s, *kernel)).collect()
            }
            Observed::All => {
                for sums in &mut sums {
                    for (p, s) in sums.iter_mut().enumerate() {
                        let past = g.window.map_or(n, |w| (p + w as usize).min(n));
                        *s /= (past - p) as f32;
                    }
                }
                sums
            }
            Observed::Newest => {
                let mean = |t: usize| sums.iter().map(|s| s[t]).sum::<f32>();
                vec![(0..n).map(mean).collect(); g.n_kv_heads]
            }
        }
    }
}

/// The mean over `kernel` neighbours; what lies outside counts as 0.
fn smoothed(x: &[f32], kernel: usize) -> Vec<f32> {
    let half = kernel / 2;
    let mean = |i: usize| {
        let near = &x[i.saturating_sub(half)..(i + half + 1).min(x.len())];
        near.iter().sum::<f32>() / kernel as f32
    };
    (0..x.len()).map(mean).collect()
}

//! kvlab: a research workbench for KV-cache compression.
//!
//! Data flows one way: an experiment's TOML becomes a plan of cells, the engine decodes with a cache, the evaluator
//! turns logits into records, the bundle keeps them, the report reads the bundle.
//!
//! The heart of it through the library: a small random model, a text, two caches in lock-step with the exact one.
//!
//! ```
//! use std::sync::Arc;
//!
//! use kvlab::cache::Built;
//! use kvlab::cache::strategy::Strategy;
//! use kvlab::compute::cpu::Cpu;
//! use kvlab::engine::clock::SystemClock;
//! use kvlab::eval::lockstep::Lockstep;
//! use kvlab::model::geometry::geometry;
//! use kvlab::model::tiny::{TinyConfig, TinyModel};
//! use kvlab::model::transformer::{LanguageModel, Transformer};
//!
//! let model = Transformer::<Cpu>::load(Arc::new(TinyModel::new(&TinyConfig::default())))?;
//! let lockstep = Lockstep {
//!     model: &model,
//!     geometry: &geometry(model.spec(), 256),
//!     calibration: None,
//!     backing_dir: None,
//!     built: &Built::default(),
//!     chunk: 64,
//!     clock: &SystemClock::new(),
//!     repeat: None,
//!     latency_steps: 0,
//!     memory_every: 0,
//!     layer_queries: 0,
//! };
//! let ids: Vec<u32> = (0..200).map(|i| i * i % 251).collect();
//! let (q8_0, q4_0) = (Strategy::bare("q8_0"), Strategy::bare("q4_0"));
//! let mut rows = Vec::new();
//! for (strategy, outcome) in [&q8_0, &q4_0].into_iter().zip(lockstep.stream(&[&q8_0, &q4_0], &ids)?) {
//!     let outcome = outcome?;
//!     let kld = outcome.tokens.iter().map(|t| t.kld).sum::<f64>() / outcome.tokens.len() as f64;
//!     let stored = outcome.memory[0].report;
//!     println!("{}: KLD {kld:.2e}, {} bytes of 200 tokens", strategy.label, stored.resident_bytes());
//!     rows.push((kld, stored.payload_bytes + stored.scale_bytes));
//! }
//! let rows: [(f64, u64); 2] = rows.try_into().expect("two strategies");
//! assert!(0.0 < rows[0].0 && rows[0].0 < rows[1].0, "4 bits lose more than 8");
//! assert_eq!(rows[0].1 * 18, rows[1].1 * 34, "a block of 32 takes 34 bytes in q8_0, 18 in q4_0");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![warn(missing_docs)]

pub mod bundle;
pub mod cache;
pub mod cli;
pub mod commands;
pub mod compute;
pub mod config;
pub mod data;
pub mod engine;
pub mod eval;
pub mod model;
pub mod report;
pub mod train;

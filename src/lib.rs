//! kvlab: a research workbench for KV-cache compression.
//!
//! Data flows one way: an experiment's TOML becomes a plan of cells, the engine decodes with a cache, the evaluator
//! turns logits into records, the bundle keeps them, the report reads the bundle.

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

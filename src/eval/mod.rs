//! Evaluation: what is measured of a cell, and how measurements become estimates.
//!
//! Invariant: nothing here names a strategy; records hold sums and per-token values, never ratios.

pub mod answers;
pub mod bars;
pub mod bench;
pub mod conformance;
pub mod drift;
pub mod floor;
pub mod generate;
pub mod kld;
pub mod latency;
pub mod layers;
pub mod lockstep;
pub mod reading;
pub mod records;
pub mod stats;

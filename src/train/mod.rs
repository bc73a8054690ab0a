//! Training: what a model teaches a cache. One file per thing that is trained.
//!
//! Invariant: training sees texts of training alone; what comes out says what it was made from.

pub mod gate;

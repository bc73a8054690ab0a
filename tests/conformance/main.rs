//! What every cache must hold, for every registered stage and for compositions: an independent oracle, invariance to
//! chunks, batches, threads and forks, truncation, honest bytes. A new stage gets these tests by its registry line.

mod budget;
mod causality;
mod compose;
mod invariance;
mod memory;
mod oracle;
mod predict;
mod support;

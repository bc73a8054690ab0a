//! What every cache must hold: the library's conformance suite over every preset and every registered stage, over
//! predictions and over compositions; and what can't be said of every strategy: each stage's own decisions, budgets, misuse. A
//! new stage gets the suite by its registry line.

mod budget;
mod bytes;
mod compose;
mod decoding;
mod delayed;
mod joint;
mod misuse;
mod oracle;
mod predict;
mod retain;
mod suite;
mod support;

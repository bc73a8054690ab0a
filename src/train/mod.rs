//! Training: what a model teaches a cache. One file per idea: what is seen (`features`), a line per head (`ridge`), a small
//! network (`mlp`), heads against each other (`end_to_end`), how well a fit does (`judge`); `gate` puts them together.
//!
//! Invariant: training sees texts of training alone; what comes out says what it was made from.

#[cfg(feature = "burn")]
mod adam;
#[cfg(feature = "burn")]
pub mod end_to_end;
pub mod features;
#[cfg(feature = "burn")]
pub mod forward;
pub mod gate;
pub mod judge;
pub mod mlp;
pub mod ridge;

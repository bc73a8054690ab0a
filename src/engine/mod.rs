//! The engine: feeding tokens to a model through a cache.
//!
//! Invariant: names no strategy; what a cache needs ([`crate::cache::Needs`]) is supplied generically.

pub mod clock;
#[cfg(test)]
pub(crate) mod plain_cache;

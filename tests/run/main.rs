//! The program on a real model: experiments of a few dozen tokens in temporary folders, from the TOML to the tables.
//!
//! Every test here needs `smollm2-135m-instruct`: it is fetched where it is not cached, and a test that can't have it says
//! so and passes.

mod answers;
mod interruption;
mod invariance;
mod library;
mod refusals;
mod support;

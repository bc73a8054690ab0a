//! The registered `encode` stages: one file per method, one line here.
//!
//! Invariants shared by all of them: what is stored for a row depends on that row alone, or, in a codec of pages, on the
//! rows of its page; every byte of the output is written and counted. Formats of blocks pad a row whose `dim` is not a
//! multiple of the block with zeros and store the padding's bytes; the integer formats have a shorter last group.

pub mod bf16;
mod bits;
mod blocks;
mod calibrated;
mod e2m1;
pub mod f16;
pub mod f32;
mod fifth_bits;
mod float8;
mod fp8;
pub mod fp8_e4m3;
pub mod fp8_e5m2;
pub mod int;
pub mod iq4_nl;
pub mod kvquant;
mod levels;
pub mod mxfp4;
pub mod nvfp4;
pub mod q4_0;
pub mod q4_1;
pub mod q5_0;
pub mod q5_1;
pub mod q8_0;
pub mod turbo;
mod with_kernel;

use super::stage::StageDef;

/// Every `encode` stage.
pub static STAGES: &[StageDef] = &[
    f32::DEF,
    f16::DEF,
    bf16::DEF,
    fp8_e4m3::DEF,
    fp8_e5m2::DEF,
    q8_0::DEF,
    q5_1::DEF,
    q5_0::DEF,
    q4_1::DEF,
    q4_0::DEF,
    iq4_nl::DEF,
    nvfp4::DEF,
    mxfp4::DEF,
    int::INT1,
    int::INT2,
    int::INT3,
    int::INT4,
    int::INT8,
    turbo::DEF,
    kvquant::DEF,
];

#[cfg(test)]
mod fixture;
#[cfg(test)]
mod kernel_tests;
#[cfg(test)]
mod page_tests;
#[cfg(test)]
mod tests;

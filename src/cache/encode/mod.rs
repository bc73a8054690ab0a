//! The registered `encode` stages: one file per method, one line here.
//!
//! Invariants shared by all of them: a row is coded alone; a block never spans two rows; a row whose `dim` is not a
//! multiple of the block is padded with zeros to whole blocks, and the padding's bytes are stored and counted.

pub mod bf16;
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
pub mod iq4_nl;
pub mod mxfp4;
pub mod nvfp4;
pub mod q4_0;
pub mod q4_1;
pub mod q5_0;
pub mod q5_1;
pub mod q8_0;

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
];

#[cfg(test)]
mod tests;

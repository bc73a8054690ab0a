//! Kernels on the CPU, and the `cpu` backend made of them. Every reduction has one fixed order, whatever the number of
//! rows, threads or vector lanes.

pub mod backend;
pub mod blocks;
mod codes;
pub mod dispatch;
mod dot;
pub mod gemm;
mod int_dot;
pub mod levels;
pub mod linear;
pub mod partials;
pub mod rows;
pub mod simd;
pub mod team;
#[cfg(target_arch = "x86_64")]
mod tile;
pub mod vector;

pub use backend::Cpu;

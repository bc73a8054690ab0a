//! Kernels on the CPU. Every reduction has one fixed order, whatever the number of rows, threads or vector lanes.

pub mod gemm;
pub mod linear;
#[cfg(target_arch = "x86_64")]
mod tile;
pub mod vector;

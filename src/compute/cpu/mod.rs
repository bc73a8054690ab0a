//! Kernels on the CPU. Every reduction has one fixed order, whatever the number of rows, threads or vector lanes.

pub mod gemm;
pub mod vector;

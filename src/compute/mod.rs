//! Compute: the kernels and the backends of the model's operations.

pub mod cpu;
pub mod cpu_time;

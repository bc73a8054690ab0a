//! Compute: the kernels and the backends of the model's operations.

#[cfg(feature = "burn")]
pub mod burn;
pub mod cpu;
pub mod cpu_time;
#[cfg(feature = "nvrtc")]
pub mod cuda;

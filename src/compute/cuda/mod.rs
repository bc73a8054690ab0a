//! NVIDIA GPUs: a device, kernels compiled at run time, and the door to burn's CUDA backend.
//!
//! Nothing here needs a toolkit to build, and nothing is loaded before it is asked for: the driver (libcuda) when a device
//! is opened, NVRTC when a kernel is compiled. Where one is missing the answer is an error that says so, never a panic.
//! The kernels are `kernels/*.cu`, embedded as text; their contracts stand there, and `kernels/README.md` has the table.
//! Everything about a launch that can be decided on the host is in a plan of plain numbers, testable without a GPU.

pub mod attend_q8_0;
mod device;
mod nvrtc;

pub use device::Device;
pub use nvrtc::{KernelSource, compile_to_cubin};

#[cfg(feature = "cuda")]
use burn::tensor::backend::BackendTypes;

/// burn on CUDA: what training on a GPU computes with.
#[cfg(feature = "cuda")]
pub type BurnCuda = burn::backend::Cuda<f32, i32>;

/// What can go wrong between a kernel's text and its result.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// No libcuda.
    #[error(
        "CUDA device {ordinal}: the NVIDIA driver's library (libcuda) is not on this machine; \
         install the driver, or use the cpu backend"
    )]
    NoDriver {
        /// The device asked for.
        ordinal: usize,
    },
    /// A driver, but no such device.
    #[error(
        "CUDA device {ordinal}: the driver shows {found} device(s), numbered from 0; choose one of these \
         (CUDA_VISIBLE_DEVICES may hide some), or use the cpu backend"
    )]
    NoDevice {
        /// The device asked for.
        ordinal: usize,
        /// How many the driver shows.
        found: usize,
    },
    /// No libnvrtc.
    #[error(
        "kernel {kernel}: NVIDIA's run-time compiler (libnvrtc.so or libnvrtc.so.12) was not found; install it, with the \
         CUDA toolkit or `pip install nvidia-cuda-nvrtc-cu12`, and put its folder on LD_LIBRARY_PATH"
    )]
    NoCompiler {
        /// The kernel's file.
        kernel: &'static str,
    },
    /// NVRTC refused.
    #[error(
        "kernel {kernel} for {arch}: NVRTC answered {answer}; if it does not know the GPU, install a newer one. {log}"
    )]
    Compile {
        /// The kernel's file.
        kernel: &'static str,
        /// The architecture asked for.
        arch: String,
        /// NVRTC's code.
        answer: String,
        /// NVRTC's messages, with lines of the kernel's file.
        log: String,
    },
    /// The driver refused.
    #[error("{what}: the CUDA driver answered {source}")]
    Driver {
        /// What was being done.
        what: &'static str,
        /// The driver's code and words.
        source: cudarc::driver::DriverError,
    },
    /// An input that no launch is made for.
    #[error("{place}: got {got}; allowed: {allowed}")]
    Input {
        /// The kernel and the part of its input.
        place: String,
        /// What was found.
        got: String,
        /// What would do.
        allowed: String,
    },
}

/// The device of burn's CUDA backend with this number.
///
/// burn panics at its first operation where the driver or the device is missing, so ask here first.
///
/// # Errors
/// [`CudaError::NoDriver`], [`CudaError::NoDevice`], [`CudaError::Driver`].
#[cfg(feature = "cuda")]
pub fn burn_device(ordinal: usize) -> Result<<BurnCuda as BackendTypes>::Device, CudaError> {
    device::require(ordinal)?;
    Ok(burn::backend::cuda::CudaDevice::new(ordinal))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_not_there_is_an_error_with_advice() {
        let beyond = 1_000_000;
        let errors = [
            Device::open(beyond).err(),
            #[cfg(feature = "cuda")]
            burn_device(beyond).err(),
        ];
        for error in errors {
            let message = error.expect("no machine has a million devices").to_string();
            assert!(
                message.starts_with("CUDA device 1000000: the "),
                "{message}"
            );
            assert!(message.ends_with("or use the cpu backend"), "{message}");
        }
    }
}

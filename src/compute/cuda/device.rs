//! One GPU: its context, one stream in which everything happens in order, and its architecture's name.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaModule, CudaStream, DriverError};
use cudarc::nvrtc::Ptx;

use super::{CudaError, KernelSource, compile_to_cubin};

/// An opened GPU. Clones share it.
#[derive(Clone)]
pub struct Device {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    arch: String,
}

impl Device {
    /// Opens the GPU with this number, counted from 0.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`], [`CudaError::NoDevice`], [`CudaError::Driver`].
    pub fn open(ordinal: usize) -> Result<Self, CudaError> {
        require(ordinal)?;
        let context = CudaContext::new(ordinal).map_err(during("opening a CUDA device"))?;
        let (major, minor) = context
            .compute_capability()
            .map_err(during("asking for the GPU's architecture"))?;
        Ok(Self {
            stream: context.default_stream(),
            context,
            arch: format!("sm_{major}{minor}"),
        })
    }

    /// The product's name.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn name(&self) -> Result<String, CudaError> {
        self.context
            .name()
            .map_err(during("asking for the GPU's name"))
    }

    /// The architecture that kernels are compiled for, such as `sm_90`.
    pub fn arch(&self) -> &str {
        &self.arch
    }

    /// Compiles a kernel's file for this GPU and loads it.
    pub(super) fn load(
        &self,
        source: &KernelSource,
        defines: &[(&str, usize)],
    ) -> Result<Arc<CudaModule>, CudaError> {
        let cubin = compile_to_cubin(source, &self.arch, defines)?;
        self.context
            .load_module(Ptx::from_binary(cubin))
            .map_err(during("loading a kernel"))
    }

    pub(super) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }
}

/// Refuses a device that is not there, before anything of the driver is called that would panic without it.
pub(super) fn require(ordinal: usize) -> Result<(), CudaError> {
    // SAFETY: this only tries to open libcuda, whose initialisers are made to run in any process.
    if !unsafe { cudarc::driver::sys::is_culib_present() } {
        return Err(CudaError::NoDriver { ordinal });
    }
    let found = match CudaContext::device_count() {
        Ok(n) => usize::try_from(n).unwrap_or(0),
        Err(DriverError(cudarc::driver::sys::CUresult::CUDA_ERROR_NO_DEVICE)) => 0,
        Err(source) => return Err(during("counting the CUDA devices")(source)),
    };
    if ordinal < found {
        Ok(())
    } else {
        Err(CudaError::NoDevice { ordinal, found })
    }
}

pub(super) fn during(what: &'static str) -> impl Fn(DriverError) -> CudaError {
    move |source| CudaError::Driver { what, source }
}

//! From a kernel's text to a cubin, by NVRTC.
//!
//! A cubin for exactly the GPU at hand rather than PTX: a driver older than the compiler refuses the compiler's PTX, but
//! loads its cubins within one major version of CUDA. Only multiply-adds that the kernel writes as `fmaf` are fused.

use std::ffi::{CString, c_char};

use cudarc::nvrtc::result::{self, NvrtcError};
use cudarc::nvrtc::sys;

use super::CudaError;

const COMMON: &str = include_str!("../../../kernels/common.cuh");

/// A kernel's file.
#[derive(Debug)]
pub struct KernelSource {
    /// Its name in `kernels/`.
    pub name: &'static str,
    /// Its text. May include `common.cuh`.
    pub text: &'static str,
}

/// Compiles for one architecture, such as `sm_90`, with each `(name, value)` of `defines` as a macro.
///
/// # Errors
/// [`CudaError::NoCompiler`] without NVRTC; [`CudaError::Compile`], with NVRTC's log, for a text or an architecture
/// that it does not accept.
pub fn compile_to_cubin(
    source: &KernelSource,
    arch: &str,
    defines: &[(&str, usize)],
) -> Result<Vec<u8>, CudaError> {
    // SAFETY: this only tries to open libnvrtc, whose initialisers are made to run in any process.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoCompiler {
            kernel: source.name,
        });
    }
    let refused = |answer: String, log: String| CudaError::Compile {
        kernel: source.name,
        arch: arch.to_owned(),
        answer,
        log,
    };
    let mut options = vec![
        format!("--gpu-architecture={arch}"),
        "--std=c++17".into(),
        "--fmad=false".into(),
    ];
    options.extend(
        defines
            .iter()
            .map(|(name, value)| format!("-D{name}={value}")),
    );
    if let Some(bad) = options.iter().find(|option| option.contains('\0')) {
        return Err(refused(
            format!("nothing: the option {bad:?} holds a NUL byte"),
            String::new(),
        ));
    }
    let program =
        Program::new(source).map_err(|error| refused(error.to_string(), String::new()))?;
    program
        .compile(&options)
        .map_err(|error| refused(error.to_string(), program.log()))?;
    program
        .cubin()
        .map_err(|error| refused(error.to_string(), program.log()))
}

/// An NVRTC program, destroyed when dropped.
struct Program(sys::nvrtcProgram);

impl Program {
    fn new(source: &KernelSource) -> Result<Self, NvrtcError> {
        let text = |text: &str| {
            CString::new(text).map_err(|_| NvrtcError(sys::nvrtcResult::NVRTC_ERROR_INVALID_INPUT))
        };
        let (main, name) = (text(source.text)?, text(source.name)?);
        let (header, header_name) = (text(COMMON)?, c"common.cuh");
        let mut program = std::ptr::null_mut();
        // SAFETY: all pointers are to NUL-terminated strings that outlive the call, NVRTC copies them, and the two arrays
        // of headers have the one entry that the count says.
        unsafe {
            sys::nvrtcCreateProgram(
                &mut program,
                main.as_ptr(),
                name.as_ptr(),
                1,
                &header.as_ptr(),
                &header_name.as_ptr(),
            )
        }
        .result()?;
        Ok(Self(program))
    }

    fn compile(&self, options: &[String]) -> Result<(), NvrtcError> {
        // SAFETY: the program was created by NVRTC and lives as long as `self`.
        unsafe { result::compile_program(self.0, options) }
    }

    /// NVRTC's messages; empty where it has none to give.
    fn log(&self) -> String {
        // SAFETY: the program was created by NVRTC and lives as long as `self`.
        let log = unsafe { result::get_program_log(self.0) }.unwrap_or_default();
        let bytes: Vec<u8> = log
            .iter()
            .map(|&byte| byte as u8)
            .take_while(|&byte| byte != 0)
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn cubin(&self) -> Result<Vec<u8>, NvrtcError> {
        let mut n_bytes = 0;
        // SAFETY: the program was created by NVRTC and lives as long as `self`; the size is written before it returns.
        unsafe { sys::nvrtcGetCUBINSize(self.0, &mut n_bytes) }.result()?;
        let mut cubin = vec![0u8; n_bytes];
        // SAFETY: as above, and the buffer has the size that NVRTC asked for.
        unsafe { sys::nvrtcGetCUBIN(self.0, cubin.as_mut_ptr().cast::<c_char>()) }.result()?;
        Ok(cubin)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program was created by NVRTC and nothing uses it after this. A failure would leak it, no more.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

//! NVRTC: CUDA C++ to machine code or PTX. Needs no GPU and no driver.

use std::ffi::{CStr, CString, c_char};

use cudarc::nvrtc::result::NvrtcError;
use cudarc::nvrtc::sys;

use super::library::Library;
use super::{CudaError, HEADER, Module, Resources, Target};

/// The compiler, once its library is loaded.
#[derive(Debug, Clone, Copy)]
pub struct Nvrtc(());

/// A compiled module.
#[derive(Debug)]
pub struct Compiled {
    /// CUBIN, or PTX with the NUL that ends it.
    pub image: Vec<u8>,
    /// A line a kernel; none for PTX.
    pub resources: Vec<Resources>,
}

impl Nvrtc {
    /// Loads the library.
    pub fn load() -> Result<Self, CudaError> {
        Library::Nvrtc.load()?;
        Ok(Self(()))
    }

    /// 1000 major + 10 minor.
    pub fn version(self) -> Result<u32, CudaError> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: two places to write to.
        unsafe { sys::nvrtcVersion(&mut major, &mut minor) }
            .result()
            .map_err(|error| call("nvrtcVersion", error))?;
        Ok(major as u32 * 1000 + minor as u32 * 10)
    }

    /// Every architecture it compiles for, as 10 major + minor.
    pub fn architectures(self) -> Result<Vec<u32>, CudaError> {
        let failed = |error| call("nvrtcGetSupportedArchs", error);
        let mut count = 0;
        // SAFETY: a place to write to.
        unsafe { sys::nvrtcGetNumSupportedArchs(&mut count) }
            .result()
            .map_err(failed)?;
        let mut all = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: as many places as were asked for.
        unsafe { sys::nvrtcGetSupportedArchs(all.as_mut_ptr()) }
            .result()
            .map_err(failed)?;
        Ok(all.into_iter().map(|sm| sm as u32).collect())
    }

    /// Compiles a module.
    pub fn compile(self, module: &Module, target: Target) -> Result<Compiled, CudaError> {
        let mut program = Program::new(module)?;
        let mut options = vec![format!("--gpu-architecture={}", target.option())];
        options.push("--std=c++17".to_owned());
        if let Target::Cubin(_) = target {
            options.push("--ptxas-options=-v".to_owned());
        }
        let result = program.compile(&options);
        let log = program.log();
        result.map_err(|error| CudaError::Compile {
            module: module.name,
            target: target.option(),
            log: format!("{error}\n{log}"),
        })?;
        let image = match target {
            Target::Cubin(_) => program.bytes("CUBIN", sys::nvrtcGetCUBINSize, sys::nvrtcGetCUBIN),
            Target::Ptx(_) => program.bytes("PTX", sys::nvrtcGetPTXSize, sys::nvrtcGetPTX),
        }?;
        Ok(Compiled {
            image,
            resources: Resources::of_log(&log),
        })
    }
}

fn call(what: &str, error: NvrtcError) -> CudaError {
    CudaError::Call {
        what: what.to_owned(),
        reason: error.to_string(),
    }
}

type SizeFn = unsafe fn(sys::nvrtcProgram, *mut usize) -> sys::nvrtcResult;
type BytesFn = unsafe fn(sys::nvrtcProgram, *mut c_char) -> sys::nvrtcResult;

/// A program of NVRTC's and the texts it refers to.
struct Program {
    handle: sys::nvrtcProgram,
    _texts: [CString; 4],
}

impl Program {
    fn new(module: &Module) -> Result<Self, CudaError> {
        let text = |text: &str| CString::new(text).expect("sources have no NUL");
        let file = format!("{}.cu", module.name);
        let texts = [
            text(module.source),
            text(&file),
            text(HEADER.1),
            text(HEADER.0),
        ];
        let [source, name, header, header_name] = &texts;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the texts end with NUL and outlive the program; one header is given and named.
        unsafe {
            sys::nvrtcCreateProgram(
                &mut handle,
                source.as_ptr(),
                name.as_ptr(),
                1,
                &header.as_ptr(),
                &header_name.as_ptr(),
            )
        }
        .result()
        .map_err(|error| call("nvrtcCreateProgram", error))?;
        Ok(Self {
            handle,
            _texts: texts,
        })
    }

    fn compile(&mut self, options: &[String]) -> Result<(), NvrtcError> {
        let options: Vec<CString> = options
            .iter()
            .map(|option| CString::new(option.as_str()).expect("options have no NUL"))
            .collect();
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        // SAFETY: the options outlive the call.
        unsafe { sys::nvrtcCompileProgram(self.handle, pointers.len() as i32, pointers.as_ptr()) }
            .result()
    }

    fn log(&self) -> String {
        let bytes = self.bytes("log", sys::nvrtcGetProgramLogSize, sys::nvrtcGetProgramLog);
        let bytes = bytes.unwrap_or_default();
        match CStr::from_bytes_until_nul(&bytes) {
            Ok(text) => text.to_string_lossy().into_owned(),
            Err(_) => String::new(),
        }
    }

    fn bytes(&self, what: &str, size: SizeFn, get: BytesFn) -> Result<Vec<u8>, CudaError> {
        let mut len = 0;
        // SAFETY: the program is alive; the buffer is as long as it says.
        unsafe {
            size(self.handle, &mut len)
                .result()
                .map_err(|error| call(what, error))?;
            let mut bytes = vec![0u8; len];
            get(self.handle, bytes.as_mut_ptr().cast())
                .result()
                .map_err(|error| call(what, error))?;
            Ok(bytes)
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created by `new`, and not used again.
        unsafe { sys::nvrtcDestroyProgram(&mut self.handle) };
    }
}

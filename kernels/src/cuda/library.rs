//! Finds CUDA's libraries at run time, so that nothing is linked and their absence is an error, not a crash.
//!
//! cudarc loads them too, but panics where a library or a function is missing. So each is loaded here
//! first, from more places, its functions are looked up, and cudarc then finds the loaded one by name.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use super::CudaError;

/// Folders to look in first, separated as in `PATH`.
pub const LIBRARY_FOLDERS: &str = "DRIVETRAIN_CUDA_LIBRARIES";

/// Where installations of CUDA put them, beside what the system's loader searches itself.
const WELL_KNOWN: [&str; 7] = [
    "/usr/local/cuda/lib64",
    "/usr/local/cuda/targets/x86_64-linux/lib",
    "/usr/local/cuda/targets/sbsa-linux/lib",
    "/usr/local/nvidia/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib/wsl/lib",
];

/// A library of CUDA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    /// `libcuda`: the driver.
    Driver,
    /// `libnvrtc`: the compiler.
    Nvrtc,
    /// `libcublasLt`: matrix products.
    CublasLt,
    /// `libnccl`: operations among devices.
    Nccl,
}

impl Library {
    /// As in `libcuda`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Driver => "libcuda",
            Self::Nvrtc => "libnvrtc",
            Self::CublasLt => "libcublasLt",
            Self::Nccl => "libnccl",
        }
    }

    /// File names, best first. The driver's plain name may be a stub without a driver behind it.
    pub fn files(self) -> &'static [&'static str] {
        match self {
            Self::Driver => &["libcuda.so.1", "libcuda.so"],
            Self::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
            Self::CublasLt => &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
            Self::Nccl => &["libnccl.so.2", "libnccl.so"],
        }
    }

    /// What we call, directly or through cudarc.
    fn functions(self) -> &'static [&'static str] {
        match self {
            Self::Driver => &[
                "cuInit",
                "cuDriverGetVersion",
                "cuDeviceGetCount",
                "cuDeviceGet",
                "cuDeviceGetAttribute",
                "cuDevicePrimaryCtxRetain",
                "cuDevicePrimaryCtxRelease_v2",
                "cuCtxSetCurrent",
                "cuStreamCreate",
                "cuStreamSynchronize",
                "cuStreamQuery",
                "cuStreamDestroy_v2",
                "cuMemAllocAsync",
                "cuMemFreeAsync",
                "cuMemAllocManaged",
                "cuMemFree_v2",
                "cuMemsetD8Async",
                "cuMemcpyHtoDAsync_v2",
                "cuMemcpyDtoHAsync_v2",
                "cuModuleLoadData",
                "cuModuleGetFunction",
                "cuModuleUnload",
                "cuFuncSetAttribute",
                "cuLaunchKernel",
                "cuGetErrorName",
                "cuGetErrorString",
            ],
            Self::Nvrtc => &[
                "nvrtcVersion",
                "nvrtcGetNumSupportedArchs",
                "nvrtcGetSupportedArchs",
                "nvrtcCreateProgram",
                "nvrtcCompileProgram",
                "nvrtcDestroyProgram",
                "nvrtcGetProgramLog",
                "nvrtcGetProgramLogSize",
                "nvrtcGetCUBIN",
                "nvrtcGetCUBINSize",
                "nvrtcGetPTX",
                "nvrtcGetPTXSize",
                "nvrtcGetErrorString",
            ],
            Self::CublasLt => &[
                "cublasLtCreate",
                "cublasLtDestroy",
                "cublasLtMatmul",
                "cublasLtMatmulAlgoGetHeuristic",
                "cublasLtMatmulDescCreate",
                "cublasLtMatmulDescDestroy",
                "cublasLtMatmulDescSetAttribute",
                "cublasLtMatmulPreferenceCreate",
                "cublasLtMatmulPreferenceDestroy",
                "cublasLtMatmulPreferenceSetAttribute",
                "cublasLtMatrixLayoutCreate",
                "cublasLtMatrixLayoutDestroy",
            ],
            Self::Nccl => &[
                "ncclGetUniqueId",
                "ncclCommInitRankConfig",
                "ncclCommGetAsyncError",
                "ncclCommAbort",
                "ncclGroupStart",
                "ncclGroupEnd",
                "ncclAllReduce",
                "ncclBroadcast",
                "ncclReduce",
                "ncclSend",
                "ncclRecv",
            ],
        }
    }

    /// What to do where it is missing.
    pub fn help(self) -> &'static str {
        match self {
            Self::Driver => "install NVIDIA's driver, or choose `device: cpu`",
            Self::Nvrtc => {
                "install the CUDA toolkit or the python package nvidia-cuda-nvrtc, and name its lib folder \
                 in DRIVETRAIN_CUDA_LIBRARIES"
            }
            Self::CublasLt => {
                "install the CUDA toolkit or the python package nvidia-cublas, and name its lib folder in \
                 DRIVETRAIN_CUDA_LIBRARIES"
            }
            Self::Nccl => {
                "install NCCL or the python package nvidia-nccl-cu13, and name its lib folder in \
                 DRIVETRAIN_CUDA_LIBRARIES; or let ranks talk through the host"
            }
        }
    }

    /// Loads it for the life of the process; the second time does nothing.
    pub(super) fn load(self) -> Result<(), CudaError> {
        static LOADED: Mutex<Vec<Library>> = Mutex::new(Vec::new());
        let mut loaded = LOADED.lock().unwrap_or_else(|poison| poison.into_inner());
        if loaded.contains(&self) {
            return Ok(());
        }
        let named = std::env::var_os(LIBRARY_FOLDERS).unwrap_or_default();
        let named: Vec<PathBuf> = std::env::split_paths(&named).collect();
        let (library, path) = self.open(&self.candidates(&named))?;
        self.check_cudarc(&library, &path)?;
        loaded.push(self);
        std::mem::forget(library);
        Ok(())
    }

    fn check_functions(self, library: &libloading::Library) -> Result<(), CudaError> {
        for function in self.functions() {
            address(library, function).ok_or(CudaError::Symbol {
                library: self.name(),
                symbol: function,
            })?;
        }
        Ok(())
    }

    /// That cudarc's calls go to the library that was checked.
    fn check_cudarc(self, library: &libloading::Library, path: &Path) -> Result<(), CudaError> {
        use cudarc::{cublaslt, driver, nccl, nvrtc};
        // SAFETY: the library was loaded once already; loading it again runs nothing.
        let theirs = unsafe {
            match self {
                Self::Driver => driver::sys::is_culib_present().then(|| driver::sys::culib()),
                Self::Nvrtc => nvrtc::sys::is_culib_present().then(|| nvrtc::sys::culib()),
                Self::CublasLt => cublaslt::sys::is_culib_present().then(|| cublaslt::sys::culib()),
                Self::Nccl => nccl::sys::is_culib_present().then(|| nccl::sys::culib()),
            }
        };
        let function = self.functions()[0];
        if theirs.is_some_and(|theirs| address(theirs, function) == address(library, function)) {
            return Ok(());
        }
        Err(CudaError::Call {
            what: format!("use {} of {}", self.name(), path.display()),
            reason:
                "the system's loader prefers another one: put this folder first in LD_LIBRARY_PATH"
                    .to_owned(),
        })
    }

    /// Loads the first of these files that can be loaded and checks that it has all we call. Returns which.
    pub fn probe(self, candidates: &[PathBuf]) -> Result<PathBuf, CudaError> {
        Ok(self.open(candidates)?.1)
    }

    fn open(self, candidates: &[PathBuf]) -> Result<(libloading::Library, PathBuf), CudaError> {
        let (library, path) = self.first_of(candidates)?;
        self.check_functions(&library)?;
        Ok((library, path))
    }

    /// Where it may be: in the folders `named`, where the system's loader looks (names without a folder), in
    /// the usual ones.
    pub fn candidates(self, named: &[PathBuf]) -> Vec<PathBuf> {
        let usual = WELL_KNOWN.map(PathBuf::from);
        let inside = |folder: &PathBuf| self.files().iter().map(|file| folder.join(file)).collect();
        let of_named: Vec<Vec<PathBuf>> = named.iter().map(inside).collect();
        let of_usual: Vec<Vec<PathBuf>> = usual.iter().map(inside).collect();
        let by_name = self.files().iter().map(PathBuf::from).collect();
        [of_named.concat(), by_name, of_usual.concat()].concat()
    }

    /// The first of the files that loads.
    fn first_of(self, candidates: &[PathBuf]) -> Result<(libloading::Library, PathBuf), CudaError> {
        let mut tried = Vec::new();
        for path in candidates {
            let is_name = path.components().count() == 1;
            if !is_name && !path.exists() {
                tried.push((path.clone(), "no such file".to_owned()));
                continue;
            }
            if self == Self::Nvrtc && !is_name {
                preload_builtins(path.parent().unwrap_or(Path::new("")));
            }
            // SAFETY: a library of CUDA, which runs nothing of consequence when loaded.
            match unsafe { libloading::Library::new(path) } {
                Ok(found) => return Ok((found, path.clone())),
                Err(error) => tried.push((path.clone(), reason(&error))),
            }
        }
        Err(CudaError::Library {
            library: self.name(),
            tried,
            help: self.help(),
        })
    }
}

fn address(library: &libloading::Library, function: &str) -> Option<usize> {
    // SAFETY: the function is not called, its address is looked at.
    let symbol = unsafe { library.get::<unsafe extern "C" fn()>(function.as_bytes()) };
    Some(*symbol.ok()? as *const () as usize)
}

/// What the system's loader said, which the error keeps as its source.
fn reason(error: &libloading::Error) -> String {
    let source = std::error::Error::source(error);
    source.map_or_else(|| error.to_string(), ToString::to_string)
}

/// NVRTC loads its built-ins by name when it first compiles; from a folder that the loader does not search they
/// are found only if they are loaded already. If one does not load, compiling says so.
fn preload_builtins(folder: &Path) {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return;
    };
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("libnvrtc-builtins.so") {
            // SAFETY: data and their accessors.
            if let Ok(library) = unsafe { libloading::Library::new(&path) } {
                std::mem::forget(library);
            }
        }
    }
}

//! A GPU through the CUDA driver: memory, one stream, and modules compiled when first used.

use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::sync::Mutex;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;

use super::blas::{Blas, WORKSPACE_BYTES};
use super::driver::{Driver, Launch};
use super::library::Library;
use super::{CudaError, Module, Nvrtc, Target};
use crate::ops::gemm::Gemm;

/// A device, its primary context and a stream of ours.
///
/// Kernels are compiled by NVRTC for this device when a module is first used, and kept for its life.
#[derive(Debug)]
pub struct Gpu {
    ordinal: usize,
    device: sys::CUdevice,
    context: sys::CUcontext,
    stream: sys::CUstream,
    nvrtc: Nvrtc,
    target: Target,
    modules: Mutex<BTreeMap<&'static str, Loaded>>,
    /// Loaded by the first product, with its workspace.
    blas: Mutex<Option<(Blas, u64)>>,
}

/// A module on the device and its kernels by name.
#[derive(Debug)]
struct Loaded {
    handle: sys::CUmodule,
    kernels: BTreeMap<&'static str, sys::CUfunction>,
}

// SAFETY: the driver's handles may be used by any thread, each call of ours sets the context it needs, and the map
// is behind a lock.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

/// More dynamic shared memory than this must be asked for, kernel by kernel.
const UNASKED_SHARED_BYTES: u32 = 48 << 10;

impl Gpu {
    /// How many devices there are.
    ///
    /// # Errors
    /// If the driver is missing or too old.
    pub fn count() -> Result<usize, CudaError> {
        Library::Driver.load()?;
        result::init().map_err(|error| failed("initialise the CUDA driver", error))?;
        device_count()
    }

    /// Device `ordinal`, as the driver counts.
    ///
    /// # Errors
    /// If the driver or NVRTC is missing or too old, there is no such device, or the three do not fit.
    pub fn open(ordinal: usize) -> Result<Self, CudaError> {
        Library::Driver.load()?;
        result::init().map_err(|error| failed("initialise the CUDA driver", error))?;
        let count = device_count()?;
        if ordinal >= count {
            return Err(CudaError::NoDevice { ordinal, count });
        }
        let nvrtc = Nvrtc::load()?;
        let device =
            result::device::get(ordinal as i32).map_err(|e| failed("find the device", e))?;
        let sm = compute_capability(device).map_err(|error| failed("ask the device", error))?;
        let toolkit = nvrtc.version()?;
        let target = Target::choose(driver_version()?, toolkit, &nvrtc.architectures()?, sm)?;
        // SAFETY: the device exists.
        let context = unsafe { result::primary_ctx::retain(device) }
            .map_err(|error| failed("open the device's context", error))?;
        let stream = current(context).and_then(|()| {
            result::stream::create(result::stream::StreamKind::NonBlocking)
                .map_err(|error| failed("make a stream", error))
        });
        match stream {
            Ok(stream) => Ok(Self {
                ordinal,
                device,
                context,
                stream,
                nvrtc,
                target,
                modules: Mutex::default(),
                blas: Mutex::default(),
            }),
            Err(error) => {
                // SAFETY: retained above; nothing of it is in use.
                let _ = unsafe { result::primary_ctx::release(device) };
                Err(error)
            }
        }
    }

    /// The device's number.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// What kernels are compiled to.
    pub fn target(&self) -> Target {
        self.target
    }

    /// The stream, with this thread in the device's context.
    pub(super) fn stream(&self) -> Result<sys::CUstream, CudaError> {
        current(self.context)?;
        Ok(self.stream)
    }

    /// A kernel, its module compiled and loaded if this is its first use.
    fn kernel(
        &self,
        module: &'static Module,
        kernel: &'static str,
    ) -> Result<sys::CUfunction, CudaError> {
        let mut modules = self
            .modules
            .lock()
            .unwrap_or_else(|poison| poison.into_inner());
        if !modules.contains_key(module.name) {
            modules.insert(module.name, self.load(module)?);
        }
        let found = modules
            .get(module.name)
            .and_then(|loaded| loaded.kernels.get(kernel));
        found.copied().ok_or_else(|| CudaError::Call {
            what: format!("find kernel {kernel}"),
            reason: format!("module {} has no such kernel", module.name),
        })
    }

    fn load(&self, module: &'static Module) -> Result<Loaded, CudaError> {
        let compiled = self.nvrtc.compile(module, self.target)?;
        let error = |error| failed(&format!("load module {}", module.name), error);
        // SAFETY: a CUBIN, or PTX that ends with NUL, which the call copies.
        let handle = unsafe { result::module::load_data(compiled.image.as_ptr().cast()) };
        let mut loaded = Loaded {
            handle: handle.map_err(error)?,
            kernels: BTreeMap::new(),
        };
        for &kernel in module.kernels {
            let name = CString::new(kernel).expect("kernels' names have no NUL");
            // SAFETY: the module is loaded.
            let function = unsafe { result::module::get_function(loaded.handle, name) };
            loaded.kernels.insert(kernel, function.map_err(error)?);
        }
        Ok(loaded)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if current(self.context).is_err() {
            return;
        }
        let modules = self
            .modules
            .get_mut()
            .unwrap_or_else(|poison| poison.into_inner());
        let blas = self
            .blas
            .get_mut()
            .unwrap_or_else(|poison| poison.into_inner())
            .take();
        // SAFETY: all are ours and used for the last time; errors of a device that is lost change nothing here.
        unsafe {
            if let Some((blas, workspace)) = blas {
                let _ = result::free_async(workspace, self.stream);
                let _ = result::stream::synchronize(self.stream);
                drop(blas);
            }
            let _ = result::stream::synchronize(self.stream);
            for loaded in modules.values() {
                let _ = result::module::unload(loaded.handle);
            }
            let _ = result::stream::destroy(self.stream);
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

impl Driver for Gpu {
    fn allocate(&self, count: usize, size: usize) -> Result<u64, CudaError> {
        let stream = self.stream()?;
        let bytes = count.saturating_mul(size);
        // SAFETY: the stream is ours; all use of the memory is on it.
        unsafe { result::malloc_async(stream, bytes) }.map_err(|error| {
            failed(
                &format!("allocate {bytes} bytes on device {}", self.ordinal),
                error,
            )
        })
    }

    unsafe fn free(&self, address: u64) {
        if let Ok(stream) = self.stream() {
            // SAFETY: the caller's. Memory of a device that is lost is lost with it.
            let _ = unsafe { result::free_async(address, stream) };
        }
    }

    /// Managed memory. Other devices' kernels run while the host touches it, which not every system allows.
    fn allocate_unified(&self, count: usize, size: usize) -> Result<u64, CudaError> {
        let stream = self.stream()?;
        let bytes = count.saturating_mul(size);
        let what = format!("allocate {bytes} managed bytes on device {}", self.ordinal);
        let concurrent = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS;
        // SAFETY: the device exists.
        let concurrent = unsafe { result::device::get_attribute(self.device, concurrent) };
        if concurrent.map_err(|error| failed(&what, error))? == 0 {
            return Err(CudaError::Call {
                what,
                reason: "host and device cannot use managed memory at the same time here (Linux on a device of \
                         compute capability 6.0 or newer can)"
                    .to_owned(),
            });
        }
        let global = sys::CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL;
        // SAFETY: the memory is filled before anyone sees it, on the stream on which all of its use is.
        unsafe {
            let address =
                result::malloc_managed(bytes, global).map_err(|error| failed(&what, error))?;
            let filled = result::memset_d8_async(address, 0, bytes, stream)
                .and_then(|()| result::stream::synchronize(stream));
            match filled {
                Ok(()) => Ok(address),
                Err(error) => {
                    let _ = result::free_sync(address);
                    Err(failed(&what, error))
                }
            }
        }
    }

    unsafe fn free_unified(&self, address: u64) {
        if self.stream().is_ok() {
            // SAFETY: the caller's. Memory of a device that is lost is lost with it.
            let _ = unsafe { result::free_sync(address) };
        }
    }

    unsafe fn zero(&self, address: u64, bytes: usize) -> Result<(), CudaError> {
        let stream = self.stream()?;
        // SAFETY: the caller's.
        unsafe { result::memset_d8_async(address, 0, bytes, stream) }
            .map_err(|error| failed(&format!("zero {bytes} bytes"), error))
    }

    unsafe fn upload(&self, from: &[u8], to: u64) -> Result<(), CudaError> {
        let stream = self.stream()?;
        let error = |error| failed(&format!("copy {} bytes to the device", from.len()), error);
        // SAFETY: the caller's; `from` is not touched again before the stream is done with it.
        unsafe {
            result::memcpy_htod_async(to, from, stream).map_err(error)?;
            result::stream::synchronize(stream).map_err(error)
        }
    }

    unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<(), CudaError> {
        let stream = self.stream()?;
        let what = format!("copy {} bytes from the device", to.len());
        // SAFETY: the caller's; `to` is not touched before the stream is done with it.
        unsafe {
            result::memcpy_dtoh_async(to, from, stream).map_err(|error| failed(&what, error))?;
            result::stream::synchronize(stream).map_err(|error| failed(&what, error))
        }
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), CudaError> {
        let stream = self.stream()?;
        let function = self.kernel(launch.module, launch.kernel)?;
        let what = || {
            format!(
                "start {} with grid {:?}, block {:?} and {} bytes of shared memory",
                launch.kernel, launch.grid, launch.block, launch.shared_bytes
            )
        };
        if launch.shared_bytes > UNASKED_SHARED_BYTES {
            let attribute =
                sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is loaded.
            unsafe {
                result::function::set_function_attribute(
                    function,
                    attribute,
                    launch.shared_bytes as i32,
                )
            }
            .map_err(|error| failed(&what(), error))?;
        }
        let mut values: Vec<*mut c_void> = launch
            .args
            .iter()
            .map(|arg| arg.value().cast_mut())
            .collect();
        let [x, y, z] = launch.grid;
        let [block_x, block_y, block_z] = launch.block;
        // SAFETY: the caller's; the driver copies the values before it returns.
        unsafe {
            result::launch_kernel(
                function,
                (x, y, z),
                (block_x, block_y, block_z),
                launch.shared_bytes,
                stream,
                &mut values,
            )
        }
        .map_err(|error| failed(&what(), error))
    }

    unsafe fn gemm(&self, dims: &Gemm, operands: [u64; 3]) -> Result<(), CudaError> {
        let stream = self.stream()?;
        let mut blas = self
            .blas
            .lock()
            .unwrap_or_else(|poison| poison.into_inner());
        if blas.is_none() {
            let workspace = self.allocate(WORKSPACE_BYTES, 1)?;
            match Blas::new(workspace) {
                Ok(new) => *blas = Some((new, workspace)),
                Err(error) => {
                    // SAFETY: allocated above.
                    unsafe { self.free(workspace) };
                    return Err(error);
                }
            }
        }
        let (blas, _) = blas.as_mut().expect("made above");
        // SAFETY: the caller's.
        unsafe { blas.gemm(stream, dims, operands) }
    }

    fn synchronize(&self) -> Result<(), CudaError> {
        let stream = self.stream()?;
        // SAFETY: the stream is ours.
        unsafe { result::stream::synchronize(stream) }
            .map_err(|error| failed("wait for the device", error))
    }
}

/// The calling thread's context from here on.
fn current(context: sys::CUcontext) -> Result<(), CudaError> {
    // SAFETY: retained by the Gpu that calls.
    unsafe { result::ctx::set_current(context) }.map_err(|error| failed("enter the context", error))
}

fn compute_capability(device: sys::CUdevice) -> Result<u32, DriverError> {
    use sys::CUdevice_attribute as Attribute;
    let ask = |attribute| {
        // SAFETY: the device exists.
        unsafe { result::device::get_attribute(device, attribute) }
    };
    let major = ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = ask(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    Ok((10 * major + minor) as u32)
}

fn device_count() -> Result<usize, CudaError> {
    let count = result::device::get_count().map_err(|error| failed("count devices", error))?;
    Ok(usize::try_from(count).unwrap_or(0))
}

fn driver_version() -> Result<u32, CudaError> {
    let mut version = 0;
    // SAFETY: a place to write to.
    unsafe { sys::cuDriverGetVersion(&mut version) }
        .result()
        .map_err(|error| failed("ask the driver's version", error))?;
    Ok(version as u32)
}

fn failed(what: &str, error: DriverError) -> CudaError {
    let name = error
        .error_name()
        .map(|name| name.to_string_lossy().into_owned());
    let text = error
        .error_string()
        .map(|text| text.to_string_lossy().into_owned());
    CudaError::Call {
        what: what.to_owned(),
        reason: match (name, text) {
            (Ok(name), Ok(text)) => format!("{name}: {text}"),
            _ => format!("{error:?}"),
        },
    }
}

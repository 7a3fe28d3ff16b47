//! Compiles the kernels as C++ over `kernels/emulator` and runs them: the [`Driver`] of the tests.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use drivetrain_kernels::Cpu;
use drivetrain_kernels::cuda::{Arg, CudaError, Driver, Launch, MODULES, Module};
use drivetrain_kernels::ops::gemm::{Gemm, gemm};

/// Kernels that test the emulator itself.
pub(crate) static PROBE: Module = Module {
    name: "probe",
    source: include_str!("../../emulator/probe.cu"),
    kernels: &[
        "probe_atomics",
        "probe_shuffles",
        "probe_reverse",
        "probe_reverse_warps",
        "probe_race",
        "probe_late_write",
        "probe_blocks_collide",
        "probe_beyond_the_end",
        "probe_before_the_start",
        "probe_beyond_shared",
        "probe_unwritten",
        "probe_unwritten_shared",
        "probe_misaligned",
        "probe_divergent_barrier",
        "probe_two_barriers",
        "probe_exited_lane",
        "probe_deadlock",
    ],
};

/// In which order threads and warps take turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    Forward,
    Backward,
}

/// The kernels on this CPU.
#[derive(Debug)]
pub(crate) struct Emulator {
    order: Order,
}

/// As the C++ side has it.
#[repr(C)]
struct Argument {
    value: *const c_void,
    bytes: u64,
    reach: u64,
    is_pointer: u32,
}

type LaunchFn = unsafe extern "C" fn(
    *const c_char,
    *const u32,
    *const u32,
    u32,
    *const Argument,
    u64,
    u32,
    *mut c_char,
    u64,
) -> c_int;

struct Functions {
    allocate: unsafe extern "C" fn(u64, u64, u32) -> u64,
    free: unsafe extern "C" fn(u64),
    upload: unsafe extern "C" fn(u64, *const c_void, u64) -> c_int,
    download: unsafe extern "C" fn(u64, *mut c_void, u64) -> c_int,
    launch: LaunchFn,
}

impl Emulator {
    /// Builds the library if a source changed; panics with the compiler's output if it cannot.
    pub(crate) fn new(order: Order) -> Self {
        functions();
        Self { order }
    }
}

fn functions() -> &'static Functions {
    static FUNCTIONS: OnceLock<Functions> = OnceLock::new();
    FUNCTIONS.get_or_init(|| {
        let path = build();
        // SAFETY: our own library; loading it registers kernels and does nothing else.
        let library = unsafe { libloading::Library::new(&path) };
        let library = library.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let library: &'static libloading::Library = Box::leak(Box::new(library));
        // SAFETY: the signatures are those of emulator.cpp.
        unsafe {
            Functions {
                allocate: *library
                    .get(b"emulator_allocate")
                    .expect("emulator_allocate"),
                free: *library.get(b"emulator_free").expect("emulator_free"),
                upload: *library.get(b"emulator_upload").expect("emulator_upload"),
                download: *library
                    .get(b"emulator_download")
                    .expect("emulator_download"),
                launch: *library.get(b"emulator_launch").expect("emulator_launch"),
            }
        }
    })
}

impl Driver for Emulator {
    fn allocate(&self, count: usize, size: usize) -> Result<u64, CudaError> {
        allocate(count, size, false)
    }

    unsafe fn free(&self, address: u64) {
        // SAFETY: the caller's.
        unsafe { (functions().free)(address) }
    }

    fn allocate_unified(&self, count: usize, size: usize) -> Result<u64, CudaError> {
        allocate(count, size, true)
    }

    unsafe fn free_unified(&self, address: u64) {
        // SAFETY: the caller's.
        unsafe { self.free(address) }
    }

    unsafe fn zero(&self, address: u64, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        unsafe { self.upload(&vec![0; bytes], address) }
    }

    unsafe fn upload(&self, from: &[u8], to: u64) -> Result<(), CudaError> {
        // SAFETY: `from` has that length; the other side is checked.
        match unsafe { (functions().upload)(to, from.as_ptr().cast(), from.len() as u64) } {
            0 => Ok(()),
            _ => Err(failed("upload", format!("{} bytes to {to:#x}", from.len()))),
        }
    }

    unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<(), CudaError> {
        // SAFETY: `to` has that length; the other side is checked.
        match unsafe { (functions().download)(from, to.as_mut_ptr().cast(), to.len() as u64) } {
            0 => Ok(()),
            _ => Err(failed(
                "download",
                format!("{} bytes of {from:#x}", to.len()),
            )),
        }
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), CudaError> {
        let name = CString::new(launch.kernel).expect("kernels' names have no NUL");
        let arguments: Vec<Argument> = launch
            .args
            .iter()
            .map(|arg| {
                let reach = match arg {
                    Arg::Pointer { reach, .. } => Some(*reach),
                    _ => None,
                };
                Argument {
                    value: arg.value(),
                    bytes: arg.size() as u64,
                    reach: reach.unwrap_or(0),
                    is_pointer: reach.is_some().into(),
                }
            })
            .collect();
        let mut error = [0 as c_char; 1024];
        // SAFETY: the arguments outlive the call, which checks what they say; the error's length is given.
        let code = unsafe {
            (functions().launch)(
                name.as_ptr(),
                launch.grid.as_ptr(),
                launch.block.as_ptr(),
                launch.shared_bytes,
                arguments.as_ptr(),
                arguments.len() as u64,
                self.order as u32,
                error.as_mut_ptr(),
                error.len() as u64,
            )
        };
        if code == 0 {
            return Ok(());
        }
        // SAFETY: snprintf ended it with NUL.
        let reason = unsafe { CStr::from_ptr(error.as_ptr()) };
        Err(failed("launch", reason.to_string_lossy().into_owned()))
    }

    /// By the CPU's own product: what is tested is how callers lay out its operands.
    unsafe fn gemm(&self, dims: &Gemm, operands: [u64; 3]) -> Result<(), CudaError> {
        let (a_rows, a_width) = if dims.transpose_a {
            (dims.k, dims.m)
        } else {
            (dims.m, dims.k)
        };
        let (b_rows, b_width) = if dims.transpose_b {
            (dims.n, dims.k)
        } else {
            (dims.k, dims.n)
        };
        let fetch = |address, rows: usize, width, stride| -> Result<Vec<f32>, CudaError> {
            let mut bytes = vec![0; 4 * ((rows - 1) * stride + width)];
            // SAFETY: the other side is checked.
            unsafe { self.download(address, &mut bytes)? };
            let float = |b: &[u8]| f32::from_ne_bytes(b.try_into().expect("four bytes"));
            Ok(bytes.chunks(4).map(float).collect())
        };
        let a = fetch(operands[0], a_rows, a_width, dims.lda)?;
        let b = fetch(operands[1], b_rows, b_width, dims.ldb)?;
        let mut c = fetch(operands[2], dims.m, dims.n, dims.ldc)?;
        gemm(Cpu::new(1), dims, &a, &b, &mut c);
        for (row, c) in c.chunks(dims.ldc).enumerate() {
            let bytes: Vec<u8> = c[..dims.n].iter().flat_map(|x| x.to_ne_bytes()).collect();
            // SAFETY: a row of C, which was fetched above.
            unsafe { self.upload(&bytes, operands[2] + (4 * row * dims.ldc) as u64)? };
        }
        Ok(())
    }

    fn synchronize(&self) -> Result<(), CudaError> {
        Ok(())
    }
}

fn allocate(count: usize, size: usize, unified: bool) -> Result<u64, CudaError> {
    // SAFETY: any sizes will do.
    match unsafe { (functions().allocate)((count * size) as u64, size as u64, unified.into()) } {
        0 => Err(failed(
            "allocate",
            format!("{count} elements of {size} bytes"),
        )),
        address => Ok(address),
    }
}

fn failed(what: &str, reason: String) -> CudaError {
    CudaError::Call {
        what: what.to_owned(),
        reason,
    }
}

/// The library, compiled anew if anything that goes into it changed.
fn build() -> PathBuf {
    // Of this file's package, whichever one's tests it is part of.
    let package = &Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels");
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulator");
    std::fs::create_dir_all(&out).expect("cargo's folder for tests can be written");
    let emulator = package.join("emulator");
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
    let flags = [
        "-std=c++17",
        "-O2",
        "-fPIC",
        // A product and a sum become one operation that rounds once, as NVRTC has it.
        "-ffp-contract=fast",
        fused_multiply_add(),
        "-DDRIVETRAIN_EMULATOR",
        "-Wall",
        "-Wno-unknown-pragmas",
        "-Werror",
        "-pthread",
    ];
    let mut shared = DefaultHasher::new();
    (&compiler, flags).hash(&mut shared);
    for header in ["emulator.h", "fiber.h", "memory.h"] {
        read(&emulator.join(header)).hash(&mut shared);
    }
    read(&package.join("src/cuda/common.cuh")).hash(&mut shared);

    let mut units: Vec<(String, String)> = ["emulator", "fiber", "memory"]
        .map(|name| (name.to_owned(), read(&emulator.join(format!("{name}.cpp")))))
        .into();
    for module in MODULES.iter().copied().chain([&PROBE]) {
        let mut text = format!("#line 1 \"{}.cu\"\n{}\n", module.name, module.source);
        for kernel in module.kernels {
            writeln!(text, "EMULATOR_KERNEL({kernel})").expect("writing to a String");
        }
        units.push((module.name.to_owned(), text));
    }
    let objects: Vec<(PathBuf, PathBuf)> = units
        .iter()
        .map(|(name, text)| {
            let mut hasher = shared.clone();
            text.hash(&mut hasher);
            let stem = format!("{name}-{:016x}", hasher.finish());
            let source = out.join(format!("{stem}.cpp"));
            std::fs::write(&source, text).expect("cargo's folder for tests can be written");
            (source, out.join(format!("{stem}.o")))
        })
        .collect();
    let mut whole = DefaultHasher::new();
    objects.hash(&mut whole);
    let library = out.join(format!("emulator-{:016x}.so", whole.finish()));
    if library.exists() {
        return library;
    }
    // Made under a name of this process and renamed, so that programs may build at the same time.
    let made = |path: &Path, arguments: &[&std::ffi::OsStr]| {
        let fresh = path.with_extension(format!("{}.tmp", std::process::id()));
        let output = Command::new(&compiler)
            .args(flags)
            .args(arguments)
            .arg("-o")
            .arg(&fresh)
            .output()
            .unwrap_or_else(|error| {
                panic!("the C++ compiler {compiler} cannot be started: {error}")
            });
        assert!(
            output.status.success(),
            "{compiler} fails:\n{}",
            String::from_utf8_lossy(&output.stderr)
        );
        std::fs::rename(&fresh, path).expect("cargo's folder for tests can be written");
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let next = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((source, object)) =
                    objects.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
                {
                    let include = [emulator.as_os_str(), Path::new("-I").as_os_str()];
                    let common = package.join("src/cuda");
                    let arguments = [include[1], include[0], include[1], common.as_os_str()];
                    if !object.exists() {
                        made(
                            object,
                            &[&arguments[..], &["-c".as_ref(), source.as_os_str()]].concat(),
                        );
                    }
                }
            });
        }
    });
    let mut arguments: Vec<&std::ffi::OsStr> = vec!["-shared".as_ref()];
    arguments.extend(objects.iter().map(|(_, object)| object.as_os_str()));
    made(&library, &arguments);
    library
}

/// The flag with which the compiler has it, if this machine does.
fn fused_multiply_add() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("fma") {
        return "-mfma";
    }
    "-Wall"
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

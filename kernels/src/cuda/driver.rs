//! What the ops ask of a device. Two things answer: a GPU, and in the tests the emulator of `kernels/emulator`.

use super::{CudaError, Module};
use crate::ops::gemm::Gemm;

/// A device with one stream: work is done in the order it is given.
///
/// Addresses are the device's. Nothing checks them but the emulator, so everything that takes one is unsafe;
/// [`Buffer`](super::Buffer) and the ops are the safe side.
pub trait Driver: std::fmt::Debug + Send + Sync {
    /// Memory for `count` elements of `size` bytes, contents undefined; at a multiple of 256.
    fn allocate(&self, count: usize, size: usize) -> Result<u64, CudaError>;

    /// Gives memory back, after the work given before.
    ///
    /// # Safety
    /// `address` is of `allocate` and not used again.
    unsafe fn free(&self, address: u64);

    /// Memory for `count` elements of `size` bytes that the host addresses too, by the same addresses; every byte has
    /// some value.
    fn allocate_unified(&self, count: usize, size: usize) -> Result<u64, CudaError>;

    /// Gives such memory back.
    ///
    /// # Safety
    /// `address` is of `allocate_unified` and not used again; all work given before has ended.
    unsafe fn free_unified(&self, address: u64);

    /// Fills memory with zeros.
    ///
    /// # Safety
    /// `bytes` bytes at `address` are of one allocation.
    unsafe fn zero(&self, address: u64, bytes: usize) -> Result<(), CudaError>;

    /// Copies to the device; `from` may be reused at once.
    ///
    /// # Safety
    /// As many bytes at `to` are of one allocation.
    unsafe fn upload(&self, from: &[u8], to: u64) -> Result<(), CudaError>;

    /// Copies from the device, after the work given before, and waits for it.
    ///
    /// # Safety
    /// As many bytes at `from` are of one allocation.
    unsafe fn download(&self, from: u64, to: &mut [u8]) -> Result<(), CudaError>;

    /// Starts a kernel.
    ///
    /// # Safety
    /// The arguments are the kernel's parameters, and it stays within the buffers they name.
    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<(), CudaError>;

    /// C = alpha op(A) op(B) + beta C, for the addresses of A, B and C; beta = 0 overwrites.
    ///
    /// # Safety
    /// f32 rows lie there as `dims` has them, and nothing else uses C. No size is 0.
    unsafe fn gemm(&self, dims: &Gemm, operands: [u64; 3]) -> Result<(), CudaError>;

    /// Waits for all work. A fault of an earlier kernel is reported here at the latest.
    fn synchronize(&self) -> Result<(), CudaError>;
}

/// One start of a kernel.
#[derive(Debug)]
pub struct Launch<'a> {
    /// Where the kernel is.
    pub module: &'static Module,
    /// Its name.
    pub kernel: &'static str,
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y and z.
    pub block: [u32; 3],
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
    /// In the order of the kernel's parameters.
    pub args: &'a [Arg],
}

/// An argument of a kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arg {
    /// A buffer or part of one.
    Pointer {
        /// Of its first element; 0 for none.
        address: u64,
        /// How many bytes the kernel may reach from there on.
        reach: u64,
    },
    /// `u32`.
    U32(u32),
    /// `u64`.
    U64(u64),
    /// `float`.
    F32(f32),
    /// `double`.
    F64(f64),
}

impl Arg {
    /// No buffer.
    pub const NULL: Self = Self::Pointer {
        address: 0,
        reach: 0,
    };

    /// Where the value lies, as `cuLaunchKernel` takes it.
    pub fn value(&self) -> *const std::ffi::c_void {
        match self {
            Self::Pointer { address, .. } => std::ptr::from_ref(address).cast(),
            Self::U32(value) => std::ptr::from_ref(value).cast(),
            Self::U64(value) => std::ptr::from_ref(value).cast(),
            Self::F32(value) => std::ptr::from_ref(value).cast(),
            Self::F64(value) => std::ptr::from_ref(value).cast(),
        }
    }

    /// Bytes of the value.
    pub fn size(&self) -> usize {
        match self {
            Self::U32(_) | Self::F32(_) => 4,
            Self::Pointer { .. } | Self::U64(_) | Self::F64(_) => 8,
        }
    }
}

impl From<u32> for Arg {
    fn from(value: u32) -> Self {
        Self::U32(value)
    }
}

impl From<bool> for Arg {
    fn from(value: bool) -> Self {
        Self::U32(value.into())
    }
}

/// Kernels take lengths that may exceed 32 bits as `u64`.
impl From<usize> for Arg {
    fn from(value: usize) -> Self {
        Self::U64(value as u64)
    }
}

impl From<f32> for Arg {
    fn from(value: f32) -> Self {
        Self::F32(value)
    }
}

impl From<f64> for Arg {
    fn from(value: f64) -> Self {
        Self::F64(value)
    }
}

/// `n` as the kernels count it.
///
/// # Panics
/// If it does not fit 32 bits.
#[track_caller]
pub(crate) fn count(name: &str, n: usize) -> u32 {
    u32::try_from(n).unwrap_or_else(|_| panic!("{name} is {n}, kernels count to {}", u32::MAX))
}

/// Threads of a block that has a row of `width`: whole warps, about four elements a thread.
pub(crate) fn row_threads(width: usize, most: usize) -> [u32; 3] {
    let threads = width.div_ceil(4).next_multiple_of(32).clamp(32, most);
    [count("threads", threads), 1, 1]
}

/// Grid and block of a kernel whose threads stride over `len` elements: at most a wave of the largest devices.
pub(crate) fn flat_blocks(len: usize) -> ([u32; 3], [u32; 3]) {
    const THREADS: usize = 256;
    let blocks = len.div_ceil(THREADS).min(MOST_BLOCKS);
    ([count("blocks", blocks), 1, 1], [THREADS as u32, 1, 1])
}

/// Blocks of [`flat_blocks`] at most.
pub(crate) const MOST_BLOCKS: usize = 1024;

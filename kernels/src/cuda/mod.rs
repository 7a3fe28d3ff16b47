//! The kernels on CUDA.
//!
//! # Where things are
//!
//! Beside `cpu.rs`, the folder of an op holds `cuda.cu` (its kernels: the contract of its `mod.rs`, same
//! shapes, f32 storage, the same accumulations) and `cuda.rs` (the functions that start them, by the
//! names of the CPU's). This folder holds the rest: `common.cuh` (what every kernel includes),
//! [`MODULES`] (the sources), [`Device`], [`Buffer`] and rows (device memory), [`Driver`] (what runs
//! kernels).
//!
//! # How the kernels are checked without a GPU
//!
//! - **Compiled for real**: `tests/nvrtc.rs` compiles every source with NVRTC for sm_80, sm_90 and sm_100. A
//!   spilled register or a byte of local memory in any kernel fails it.
//! - **Run for real**: `tests/parity` runs the functions of [`ops`] against the f64 references with the
//!   tolerances of the CPU's tests. Its [`Driver`] is the emulator in `kernels/emulator`, which compiles
//!   the same `cuda.cu` as C++: a CUDA thread is a fiber, so shared memory, `__syncthreads`, shuffles, votes
//!   and atomics have their meaning. Every access of global and shared memory is checked; out of bounds,
//!   misaligned, a race (two threads, one of them writing, no barrier between), a read of memory that
//!   nobody wrote, a barrier that some threads do not reach: each is an error that names kernel, block
//!   and thread. Threads run in one order in CI and in two with `--include-ignored`.
//!
//! What this cannot show: speed, and faults of a real driver. **These kernels have not been run on a GPU.**
//! `kernels/scripts/gpu-check.sh` runs the same parity program on one.

mod buffer;
mod driver;
mod error;
mod library;
mod nvrtc;
pub mod ops;
mod source;
mod target;

pub use buffer::{Buffer, Device, Element, Rows, RowsMut, View, ViewMut};
pub use driver::{Arg, Driver, Launch};
pub use error::CudaError;
pub use library::{LIBRARY_FOLDERS, Library};
pub use nvrtc::{Compiled, Nvrtc, Resources};
pub use source::{ARCHITECTURES, HEADER, MODULES, Module};
pub use target::Target;

pub(crate) use driver::{MOST_BLOCKS, count, flat_blocks, row_threads};

//! The kernels on CUDA.
//!
//! # Where things are
//!
//! Beside `cpu.rs`, the folder of an op holds `cuda.cu` (its kernels: the contract of its `mod.rs`, same
//! shapes, f32 storage, the same accumulations) and `cuda.rs` (the functions that start them, by the names of
//! the CPU's; they are in [`ops`]). This folder holds the rest:
//!
//! | file | holds |
//! |---|---|
//! | `common.cuh` | what every kernel includes: buffers, shared memory, sums over a block |
//! | `source.rs` | the sources as modules, [`MODULES`] |
//! | `buffer.rs` | [`Device`], [`Buffer`], views and rows: device memory, typed |
//! | `unified.rs` | [`Unified`]: memory that the host addresses too, so that [`crate::ops`] run there on slices |
//! | `call.rs` | the slices of one such op: taken by address, or copied there and back |
//! | `driver.rs` | [`Driver`]: what the ops ask of a device |
//! | `target.rs` | [`Target`]: machine code or PTX, by driver, compiler and device |
//! | `ptxas.rs` | the assembler's report of registers, spills and shared memory |
//! | `library.rs` | finding libcuda, libnvrtc, libcublasLt and libnccl (feature `cuda`) |
//! | `nvrtc.rs` | the compiler (feature `cuda`) |
//! | `gpu.rs`, `blas.rs` | a GPU as a [`Driver`], cuBLASLt for products (feature `cuda`) |
//! | `nccl.rs` | operations among the devices of several ranks (feature `cuda`) |
//!
//! The feature `cuda` links nothing. Its libraries are loaded when a GPU is opened; one that is missing, too
//! old or broken is a [`CudaError`] that names it and every path that was tried. Without the feature all of
//! the above is compiled and tested but what talks to those libraries.
//!
//! On a device, ids, positions and targets cannot be checked before they are used; a function that the CPU has
//! panic says here what becomes of them (NaN, mostly). Sums have one order, so results are the same in every
//! run; there are no atomics in any of the ops.
//!
//! # Two ways to call an op
//!
//! [`ops`] take views of device memory and return at once. The functions of [`crate::ops`], given a [`Unified`], take
//! slices as on the CPU, start the same kernels, and return when the device is done; the `megatron` engine runs on
//! these (`device: cuda`). Some work stays with the host whatever the processor, over the same memory, since its results
//! are needed there or it is little: [`permute::sort`](crate::ops::permute::sort),
//! [`cross_entropy::combine`](crate::ops::cross_entropy::combine),
//! [`rope::fill_tables`](crate::ops::rope::fill_tables), [`router::expert_loads`](crate::ops::router::expert_loads) and
//! [`router::update_bias`](crate::ops::router::update_bias). [`grouped_gemm`](crate::ops::grouped_gemm) is a product an
//! expert, one after the other.
//!
//! # How the kernels are checked without a GPU
//!
//! - **Compiled for real**: `tests/nvrtc.rs` compiles every source with NVRTC for sm_80, sm_90 and sm_100
//!   ([`ARCHITECTURES`]). A spilled register or a byte of local memory in any kernel fails it. `cargo xtask
//!   test` fetches NVRTC and runs it; without NVRTC it fails and says so.
//! - **Run for real**: `tests/parity` runs the functions of [`ops`] against the f64 references with the
//!   tolerances of the CPU's tests. Its [`Driver`] is the emulator in `kernels/emulator`, which compiles
//!   the same `cuda.cu` as C++: a CUDA thread is a fiber, so shared memory, `__syncthreads`, shuffles, votes
//!   and atomics have their meaning. Every access of global and shared memory is checked; out of bounds,
//!   misaligned, a race (two threads, one of them writing, no barrier between), a read of memory that
//!   nobody wrote, a barrier that some threads do not reach: each is an error that names kernel, block
//!   and thread. Threads run in one order in CI and in two with `cargo xtask test --all`. The emulator is
//!   itself tested by kernels with one such defect each (`probe.cu`).
//! - **As an engine uses them**: `backend-megatron/tests/on_device.rs` runs conformance cases of the engine with
//!   `device: cuda` over the emulator: same truths, same tolerances as on the CPU.
//!
//! What this cannot show: speed, cuBLASLt's side of the products, how managed memory behaves, and faults of a real
//! driver. **None of it has been run on a GPU.** `kernels/scripts/gpu-check.sh` runs the same parity program, and the
//! engine's conformance cases, on one, from prebuilt binaries.
//!
//! # When you write a kernel
//!
//! Take buffers as `In`, `Out` or `InOut` and shared memory from `SHARED` or `DYNAMIC_SHARED`: that is what lets the
//! emulator check them. Make sums in an order that only the shape decides. Add the kernel to `source.rs`, its function
//! to `cuda.rs`, and its cases to `tests/parity`, awkward shapes first: one token, widths that no block divides,
//! nothing at all.

#[cfg(feature = "cuda")]
mod blas;
mod buffer;
mod call;
mod driver;
mod error;
#[cfg(feature = "cuda")]
mod gpu;
#[cfg(feature = "cuda")]
mod library;
#[cfg(feature = "cuda")]
mod nccl;
#[cfg(feature = "cuda")]
mod nvrtc;
pub mod ops;
mod ptxas;
mod source;
mod target;
mod unified;

pub use buffer::{Buffer, Device, Element, Rows, RowsMut, View, ViewMut};
pub use driver::{Arg, Driver, Launch};
pub use error::CudaError;
#[cfg(feature = "cuda")]
pub use gpu::Gpu;
#[cfg(feature = "cuda")]
pub use library::{LIBRARY_FOLDERS, Library};
#[cfg(feature = "cuda")]
pub use nccl::{NcclGroup, NcclId};
#[cfg(feature = "cuda")]
pub use nvrtc::{Compiled, Nvrtc};
pub use ptxas::Resources;
pub use source::{ARCHITECTURES, HEADER, MODULES, Module};
pub use target::Target;
pub use unified::{Unified, UnifiedBuffer};

pub(crate) use call::Call;
pub(crate) use driver::{MOST_BLOCKS, count, flat_blocks, row_threads};

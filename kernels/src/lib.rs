//! Kernels of a Llama-family transformer in f32, with explicit backward passes and no autograd.
//!
//! Each op has a folder under [`ops`]: `mod.rs` is the contract (shapes, formula, dtype and accumulation
//! rules, scratch size) and the public functions, `reference.rs` the plain f64 form that tests compare
//! against, `cpu.rs` the vectorised form, `cuda.cu` and `cuda.rs` the form for a device. All functions take plain
//! slices; the caller owns every buffer, scratch included, so that a steady-state step need not allocate. Their first
//! argument says where they run: a [`Cpu`], or a device whose [unified](cuda::Unified) memory the slices lie in ([`On`]).
//!
//! A length that does not fit the dimensions is a defect of the calling engine: functions panic with the
//! name of the slice and both lengths, before they touch memory.
//!
//! Shape legend: B sequences, T packed tokens, D model, H query heads, K key/value heads, E head dim,
//! F feed-forward, V vocabulary, X experts, N rows.
//!
//! Where to read: [`Cpu`] says which instructions and how many threads, [`Processor`] is what an engine keeps of it and
//! where its [`Memory`] comes from, [`Rows`] and [`RowsMut`] are bands
//! of columns in a wider buffer (q, k and v in one fused projection), then any op.

#[macro_use]
mod cpu;
mod check;
pub mod cuda;
mod micro;
pub mod ops;
mod processor;
mod rows;
mod simd;
#[cfg(test)]
mod testing;

pub use cpu::{Cpu, Isa};
pub use processor::{Memory, On, Processor};
pub use rows::{Rows, RowsMut};

/// FLOP/s that f32 GEMM attains with `threads` threads: the peak that model FLOPs utilisation refers to.
///
/// The best of several products at a feed-forward layer's shape; takes below 0.3 s on one modern core.
pub fn measure_peak_flops(threads: usize) -> f64 {
    ops::gemm::measure_rate(Cpu::new(threads))
}

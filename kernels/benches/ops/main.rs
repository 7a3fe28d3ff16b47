//! Every op at the size of a small Llama (8 layers, D 512, H 8, K 4, E 64, F 1376, V 8192; 4 sequences of
//! 512 tokens), with its rate as a share of a limit measured in the same run: GEMM FLOP/s for what computes,
//! copy bandwidth over as many bytes for what moves memory.
//!
//! `cargo bench -p drivetrain-kernels [-- FILTER]`. One thread, or `KERNEL_THREADS=n`.

mod compute;
mod experts;
mod memory;
mod report;

use criterion::{Criterion, criterion_group, criterion_main};
use drivetrain_kernels::Cpu;

use report::Report;

pub(crate) const SEQUENCES: usize = 4;
pub(crate) const T: usize = 2048;
pub(crate) const D: usize = 512;
pub(crate) const H: usize = 8;
pub(crate) const K: usize = 4;
pub(crate) const E: usize = 64;
pub(crate) const F: usize = 1376;
pub(crate) const V: usize = 8192;

/// Values in [-1, 1) that repeat.
pub(crate) fn values(len: usize) -> Vec<f32> {
    (0..len as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 23) as f32 - 1.0)
        .collect()
}

fn all(criterion: &mut Criterion) {
    let threads = std::env::var("KERNEL_THREADS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(1);
    let cpu = Cpu::new(threads);
    let mut report = Report::new(cpu, criterion);
    compute::linear(&mut report);
    compute::attention(&mut report);
    memory::rows(&mut report);
    memory::cross_entropy(&mut report);
    memory::flat(&mut report);
    experts::experts(&mut report);
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(std::time::Duration::from_millis(100))
        .measurement_time(std::time::Duration::from_millis(600))
        .without_plots();
    targets = all
}
criterion_main!(benches);

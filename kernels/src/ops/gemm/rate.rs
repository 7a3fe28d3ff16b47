//! The machine's measured limits: what other ops and MFU are compared with.

use std::time::Instant;

use super::{Gemm, gemm};
use crate::Cpu;

/// Attainable f32 GEMM rate in FLOP/s with the threads of `cpu`: the best of several products at the shape
/// of a feed-forward layer (2048 tokens, 512 to 1376). Takes about 0.2 s on one modern core.
pub fn measure_rate(cpu: Cpu) -> f64 {
    let dims = Gemm::nt(2048, 1376, 512);
    let a = vec![0.5; dims.m * dims.k];
    let b = vec![0.25; dims.k * dims.n];
    let mut c = vec![0.0; dims.m * dims.n];
    let seconds = best_of(8, || gemm(cpu, &dims, &a, &b, &mut c));
    dims.flops() / seconds
}

/// Bandwidth in byte/s (read plus written) of copying `bytes` with the threads of `cpu`: the best of several.
///
/// Choose `bytes` like the working set of the op that is compared; what fits a cache copies faster.
pub fn measure_copy_bandwidth(cpu: Cpu, bytes: usize) -> f64 {
    let len = (bytes / 4).max(1);
    let from = vec![1.0f32; len];
    let mut to = vec![0.0f32; len];
    let seconds = best_of(8, || {
        let to = crate::rows::SharedMut::new(&mut to);
        cpu.for_ranges(len, 1 << 14, |range| {
            // SAFETY: for_ranges hands out disjoint ranges.
            unsafe { to.range(range.clone()) }.copy_from_slice(&from[range]);
        });
    });
    (8 * len) as f64 / seconds
}

fn best_of(rounds: usize, mut work: impl FnMut()) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..rounds {
        let start = Instant::now();
        work();
        best = best.min(start.elapsed().as_secs_f64());
    }
    best
}

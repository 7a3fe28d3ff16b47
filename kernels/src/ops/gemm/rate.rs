//! The machine's attainable GEMM rate: what MFU refers to.

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
    let mut best = f64::INFINITY;
    for _ in 0..8 {
        let start = Instant::now();
        gemm(cpu, &dims, &a, &b, &mut c);
        best = best.min(start.elapsed().as_secs_f64());
    }
    dims.flops() / best
}

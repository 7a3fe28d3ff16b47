//! Flat passes over memory: sums of squares, additions, scaling, conversion between f32 and bf16.
//!
//! No shapes beyond a length, no scratch.

mod cpu;
#[cfg(test)]
mod tests;

use half::bf16;

use crate::{Cpu, check};

/// What a gradient norm is made of.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SumOfSquares {
    /// Sum of x^2 in f64; the same for any number of threads.
    pub sum: f64,
    /// Every element is finite.
    pub finite: bool,
}

/// Sum of squares and whether all elements are finite, in one pass.
pub fn sum_of_squares(cpu: Cpu, x: &[f32]) -> SumOfSquares {
    let sum = cpu::sum_of_squares(cpu, x);
    SumOfSquares {
        sum,
        // The square of a finite f32 is at most 1.2e77, so no sum of fewer than 1e231 of them overflows.
        finite: sum.is_finite(),
    }
}

/// y += x.
#[track_caller]
pub fn add_assign(cpu: Cpu, y: &mut [f32], x: &[f32]) {
    axpy(cpu, 1.0, x, y);
}

/// y += alpha x.
#[track_caller]
pub fn axpy(cpu: Cpu, alpha: f32, x: &[f32], y: &mut [f32]) {
    check::len("x", x, y.len());
    cpu::axpy(cpu, alpha, x, y);
}

/// out = x + y.
#[track_caller]
pub fn add(cpu: Cpu, x: &[f32], y: &[f32], out: &mut [f32]) {
    check::len("x", x, out.len());
    check::len("y", y, out.len());
    cpu::add(cpu, x, y, out);
}

/// x *= alpha.
pub fn scale(cpu: Cpu, alpha: f32, x: &mut [f32]) {
    cpu::scale(cpu, alpha, x);
}

/// Rounds to nearest, ties to even; NaN stays NaN.
#[track_caller]
pub fn f32_to_bf16(cpu: Cpu, x: &[f32], y: &mut [bf16]) {
    check::len("y", y, x.len());
    cpu::f32_to_bf16(cpu, x, y);
}

/// Exact.
#[track_caller]
pub fn bf16_to_f32(cpu: Cpu, x: &[bf16], y: &mut [f32]) {
    check::len("y", y, x.len());
    cpu::bf16_to_f32(cpu, x, y);
}

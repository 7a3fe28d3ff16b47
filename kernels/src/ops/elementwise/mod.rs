//! Flat passes over memory: sums of squares, additions, scaling, conversion between f32 and bf16.
//!
//! No shapes beyond a length, no scratch.

mod cpu;
#[cfg(test)]
mod tests;

use half::bf16;

use crate::cuda::ops::elementwise as device;
use crate::{On, check};

/// What a gradient norm is made of.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SumOfSquares {
    /// Sum of x^2 in f64; the same for any number of threads.
    pub sum: f64,
    /// Every element is finite.
    pub finite: bool,
}

/// Sum of squares and whether all elements are finite, in one pass. NaN where the device has failed.
pub fn sum_of_squares<'on>(on: impl Into<On<'on>>, x: &[f32]) -> SumOfSquares {
    let sum = match on.into() {
        On::Cpu(cpu) => cpu::sum_of_squares(cpu, x),
        On::Device(unified) => {
            let mut total = [f64::NAN];
            unified.run(|call| {
                let (x, total) = (call.input(x)?, call.output(&mut total)?);
                let mut scratch = call.device().uninit(device::SUM_OF_SQUARES_SCRATCH)?;
                device::sum_of_squares(call.device(), x, &mut scratch, total)
            });
            total[0]
        }
    };
    SumOfSquares {
        sum,
        // The square of a finite f32 is at most 1.2e77, so no sum of fewer than 1e231 of them overflows.
        finite: sum.is_finite(),
    }
}

/// y += x.
#[track_caller]
pub fn add_assign<'on>(on: impl Into<On<'on>>, y: &mut [f32], x: &[f32]) {
    axpy(on, 1.0, x, y);
}

/// y += alpha x.
#[track_caller]
pub fn axpy<'on>(on: impl Into<On<'on>>, alpha: f32, x: &[f32], y: &mut [f32]) {
    check::len("x", x, y.len());
    match on.into() {
        On::Cpu(cpu) => cpu::axpy(cpu, alpha, x, y),
        On::Device(unified) => unified.run(|call| {
            let (x, y) = (call.input(x)?, call.output(y)?);
            device::axpy(call.device(), alpha, x, y)
        }),
    }
}

/// out = x + y.
#[track_caller]
pub fn add<'on>(on: impl Into<On<'on>>, x: &[f32], y: &[f32], out: &mut [f32]) {
    check::len("x", x, out.len());
    check::len("y", y, out.len());
    match on.into() {
        On::Cpu(cpu) => cpu::add(cpu, x, y, out),
        On::Device(unified) => unified.run(|call| {
            let (x, y, out) = (call.input(x)?, call.input(y)?, call.output(out)?);
            device::add(call.device(), x, y, out)
        }),
    }
}

/// x *= alpha.
pub fn scale<'on>(on: impl Into<On<'on>>, alpha: f32, x: &mut [f32]) {
    match on.into() {
        On::Cpu(cpu) => cpu::scale(cpu, alpha, x),
        On::Device(unified) => unified.run(|call| {
            let x = call.output(x)?;
            device::scale(call.device(), alpha, x)
        }),
    }
}

/// Rounds to nearest, ties to even; NaN stays NaN.
#[track_caller]
pub fn f32_to_bf16<'on>(on: impl Into<On<'on>>, x: &[f32], y: &mut [bf16]) {
    check::len("y", y, x.len());
    match on.into() {
        On::Cpu(cpu) => cpu::f32_to_bf16(cpu, x, y),
        On::Device(unified) => unified.run(|call| {
            let (x, y) = (call.input(x)?, call.output(y)?);
            device::f32_to_bf16(call.device(), x, y)
        }),
    }
}

/// Exact.
#[track_caller]
pub fn bf16_to_f32<'on>(on: impl Into<On<'on>>, x: &[bf16], y: &mut [f32]) {
    check::len("y", y, x.len());
    match on.into() {
        On::Cpu(cpu) => cpu::bf16_to_f32(cpu, x, y),
        On::Device(unified) => unified.run(|call| {
            let (x, y) = (call.input(x)?, call.output(y)?);
            device::bf16_to_f32(call.device(), x, y)
        }),
    }
}

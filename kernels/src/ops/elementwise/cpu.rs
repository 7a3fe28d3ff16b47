//! Loops the compiler vectorises.

use half::bf16;
use pulp::Simd;

use crate::Cpu;
use crate::rows::SharedMut;
use crate::simd::{dot_f64, fma};

/// Elements a thread takes at least; also the block of the sum of squares.
const STEP: usize = 1 << 14;

/// Blocks are summed in order, whoever computed them.
pub(super) fn sum_of_squares(cpu: Cpu, x: &[f32]) -> f64 {
    const BLOCKS: usize = 64;
    let mut total = 0.0;
    // Partial sums live on the stack: a group of blocks is spread over the threads, then added up.
    for group in x.chunks(BLOCKS * STEP) {
        let mut partial = [0f64; BLOCKS];
        let blocks = group.len().div_ceil(STEP);
        let shared = SharedMut::new(&mut partial);
        cpu.for_ranges(blocks, 1, |range| {
            for block in range {
                let x = &group[block * STEP..group.len().min((block + 1) * STEP)];
                // SAFETY: for_ranges hands out disjoint ranges.
                let out = unsafe { shared.range(block..block + 1) };
                out[0] = dispatch!(cpu, dot_f64, x, x);
            }
        });
        total += partial[..blocks].iter().sum::<f64>();
    }
    total
}

pub(super) fn axpy(cpu: Cpu, alpha: f32, x: &[f32], y: &mut [f32]) {
    for_parts(cpu, y, |start, y| {
        dispatch!(cpu, axpy_part, alpha, &x[start..][..y.len()], y);
    });
}

#[inline(always)]
fn axpy_part<S: Simd>(_: S, alpha: f32, x: &[f32], y: &mut [f32]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y = fma::<S>(alpha, x, *y);
    }
}

pub(super) fn add(cpu: Cpu, x: &[f32], y: &[f32], out: &mut [f32]) {
    for_parts(cpu, out, |start, out| {
        dispatch!(cpu, add_part, &x[start..], &y[start..], out);
    });
}

#[inline(always)]
fn add_part<S: Simd>(_: S, x: &[f32], y: &[f32], out: &mut [f32]) {
    for (out, (&x, &y)) in out.iter_mut().zip(x.iter().zip(y)) {
        *out = x + y;
    }
}

pub(super) fn scale(cpu: Cpu, alpha: f32, x: &mut [f32]) {
    for_parts(cpu, x, |_, x| dispatch!(cpu, scale_part, alpha, x));
}

#[inline(always)]
fn scale_part<S: Simd>(_: S, alpha: f32, x: &mut [f32]) {
    for x in x {
        *x *= alpha;
    }
}

pub(super) fn f32_to_bf16(cpu: Cpu, x: &[f32], y: &mut [bf16]) {
    for_parts(cpu, y, |start, y| {
        dispatch!(cpu, to_bf16_part, &x[start..], y)
    });
}

#[inline(always)]
fn to_bf16_part<S: Simd>(_: S, x: &[f32], y: &mut [bf16]) {
    for (y, &x) in y.iter_mut().zip(x) {
        let bits = x.to_bits();
        // Half of what is cut off, plus one if the kept part is odd: ties go to even.
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        // The quiet bit keeps a NaN from turning into an infinity.
        let nan = (bits >> 16) | 0x40;
        *y = bf16::from_bits(if x.is_nan() { nan } else { rounded } as u16);
    }
}

pub(super) fn bf16_to_f32(cpu: Cpu, x: &[bf16], y: &mut [f32]) {
    for_parts(cpu, y, |start, y| {
        dispatch!(cpu, from_bf16_part, &x[start..], y)
    });
}

#[inline(always)]
fn from_bf16_part<S: Simd>(_: S, x: &[bf16], y: &mut [f32]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y = f32::from_bits(u32::from(x.to_bits()) << 16);
    }
}

fn for_parts<T: Send>(cpu: Cpu, out: &mut [T], f: impl Fn(usize, &mut [T]) + Sync) {
    let len = out.len();
    let out = SharedMut::new(out);
    cpu.for_ranges(len, STEP, |range| {
        let start = range.start;
        // SAFETY: for_ranges hands out disjoint ranges.
        f(start, unsafe { out.range(range) });
    });
}

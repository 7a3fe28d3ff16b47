//! Two passes over a row that stays in cache; the weight gradient by bands of columns.

use std::ops::Range;

use pulp::Simd;

use super::RmsNormDims;
use crate::rows::SharedMut;
use crate::simd::{LANES, dot_f64, fma, sum_lanes};
use crate::{Cpu, Rows, RowsMut};

/// Rows below which a second thread does not pay.
const ROW_STEP: usize = 16;

pub(super) fn forward(
    cpu: Cpu,
    dims: &RmsNormDims,
    x: Rows<'_>,
    weight: &[f32],
    y: RowsMut<'_>,
    inv_rms: &mut [f32],
) {
    let (y, inv_rms, groups) = (&y, SharedMut::new(inv_rms), dims.groups);
    cpu.for_ranges(dims.tokens, ROW_STEP, |tokens| {
        // SAFETY: for_ranges hands out disjoint ranges of tokens.
        let inv_rms = unsafe { inv_rms.range(tokens.start * groups..tokens.end * groups) };
        dispatch!(
            cpu,
            forward_rows,
            dims,
            x,
            weight,
            y,
            inv_rms,
            tokens.clone()
        );
    });
}

#[inline(always)]
fn forward_rows<S: Simd>(
    simd: S,
    dims: &RmsNormDims,
    x: Rows<'_>,
    weight: &[f32],
    y: &RowsMut<'_>,
    inv_rms: &mut [f32],
    tokens: Range<usize>,
) {
    for (t, inv_rms) in tokens.zip(inv_rms.chunks_mut(dims.groups.max(1))) {
        // SAFETY: no other thread has this token.
        let y = unsafe { y.row_shared(t) };
        let rows = x.row(t).chunks(dims.width).zip(y.chunks_mut(dims.width));
        for ((x, y), inv_rms) in rows.zip(inv_rms) {
            *inv_rms = normalise(simd, dims, x, weight, y);
        }
    }
}

#[inline(always)]
fn normalise<S: Simd>(
    simd: S,
    dims: &RmsNormDims,
    x: &[f32],
    weight: &[f32],
    y: &mut [f32],
) -> f32 {
    let mean_square = dot_f64(simd, x, x) / dims.width as f64;
    let inv_rms = (1.0 / (mean_square + dims.eps).sqrt()) as f32;
    scale_row(x, weight, inv_rms, y);
    inv_rms
}

#[inline(always)]
fn scale_row(x: &[f32], weight: &[f32], inv_rms: f32, y: &mut [f32]) {
    for ((y, &x), &w) in y.iter_mut().zip(x).zip(weight) {
        *y = x * inv_rms * w;
    }
}

pub(super) fn apply(
    cpu: Cpu,
    dims: &RmsNormDims,
    x: Rows<'_>,
    weight: &[f32],
    inv_rms: &[f32],
    y: &RowsMut<'_>,
) {
    cpu.for_ranges(dims.tokens, ROW_STEP, |tokens| {
        dispatch!(cpu, apply_rows, dims, x, weight, inv_rms, y, tokens.clone());
    });
}

#[inline(always)]
fn apply_rows<S: Simd>(
    _: S,
    dims: &RmsNormDims,
    x: Rows<'_>,
    weight: &[f32],
    inv_rms: &[f32],
    y: &RowsMut<'_>,
    tokens: Range<usize>,
) {
    for t in tokens {
        // SAFETY: no other thread has this token.
        let y = unsafe { y.row_shared(t) };
        let rows = x.row(t).chunks(dims.width).zip(y.chunks_mut(dims.width));
        for ((x, y), &inv_rms) in rows.zip(&inv_rms[t * dims.groups..]) {
            scale_row(x, weight, inv_rms, y);
        }
    }
}

pub(super) fn forward_residual(
    cpu: Cpu,
    dims: &RmsNormDims,
    (x, residual): (&[f32], &[f32]),
    weight: &[f32],
    (h, y): (&mut [f32], &mut [f32]),
    inv_rms: &mut [f32],
) {
    let (h, y, inv_rms) = (
        SharedMut::new(h),
        SharedMut::new(y),
        SharedMut::new(inv_rms),
    );
    cpu.for_ranges(dims.tokens, ROW_STEP, |tokens| {
        let span = tokens.start * dims.width..tokens.end * dims.width;
        // SAFETY: for_ranges hands out disjoint ranges of tokens.
        let (h, y, inv_rms) = unsafe {
            (
                h.range(span.clone()),
                y.range(span.clone()),
                inv_rms.range(tokens),
            )
        };
        let inputs = (&x[span.clone()], &residual[span]);
        dispatch!(cpu, residual_rows, dims, inputs, weight, h, y, inv_rms);
    });
}

#[inline(always)]
fn residual_rows<S: Simd>(
    simd: S,
    dims: &RmsNormDims,
    (x, residual): (&[f32], &[f32]),
    weight: &[f32],
    h: &mut [f32],
    y: &mut [f32],
    inv_rms: &mut [f32],
) {
    let width = dims.width;
    let inputs = x.chunks(width).zip(residual.chunks(width));
    let outputs = h.chunks_mut(width).zip(y.chunks_mut(width));
    for (((x, residual), (h, y)), inv_rms) in inputs.zip(outputs).zip(inv_rms) {
        for ((h, &x), &r) in h.iter_mut().zip(x).zip(residual) {
            *h = x + r;
        }
        *inv_rms = normalise(simd, dims, h, weight, y);
    }
}

pub(super) fn backward_input(
    cpu: Cpu,
    dims: &RmsNormDims,
    inputs: (Rows<'_>, Rows<'_>),
    weight: &[f32],
    inv_rms: &[f32],
    accumulate: bool,
    dx: RowsMut<'_>,
) {
    let dx = &dx;
    cpu.for_ranges(dims.tokens, ROW_STEP, |tokens| {
        dispatch!(
            cpu,
            input_rows,
            dims,
            inputs,
            weight,
            inv_rms,
            accumulate,
            dx,
            tokens.clone()
        );
    });
}

#[inline(always)]
#[allow(clippy::too_many_arguments)] // the operands of one fused op
fn input_rows<S: Simd>(
    _: S,
    dims: &RmsNormDims,
    (dy, x): (Rows<'_>, Rows<'_>),
    weight: &[f32],
    inv_rms: &[f32],
    accumulate: bool,
    dx: &RowsMut<'_>,
    tokens: Range<usize>,
) {
    for t in tokens {
        // SAFETY: no other thread has this token.
        let dx = unsafe { dx.row_shared(t) };
        let inputs = dy
            .row(t)
            .chunks(dims.width)
            .zip(x.row(t).chunks(dims.width));
        let inv_rms = &inv_rms[t * dims.groups..][..dims.groups];
        for (((dy, x), dx), &inv_rms) in inputs.zip(dx.chunks_mut(dims.width)).zip(inv_rms) {
            let mean = dot3(dy, weight, x) / dims.width as f64;
            let pull = -(mean * f64::from(inv_rms).powi(3)) as f32;
            let terms = dy.iter().zip(weight).zip(x);
            if accumulate {
                for (dx, ((&dy, &w), &x)) in dx.iter_mut().zip(terms) {
                    *dx += fma::<S>(x, pull, dy * w * inv_rms);
                }
            } else {
                for (dx, ((&dy, &w), &x)) in dx.iter_mut().zip(terms) {
                    *dx = fma::<S>(x, pull, dy * w * inv_rms);
                }
            }
        }
    }
}

/// Sum of (a b) c, the product of a and b in f32, the rest in f64.
#[inline(always)]
fn dot3(a: &[f32], b: &[f32], c: &[f32]) -> f64 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let (c, c_rest) = c.as_chunks::<LANES>();
    let mut lanes = [0f64; LANES];
    for ((a, b), c) in a.iter().zip(b).zip(c) {
        for i in 0..LANES {
            lanes[i] += f64::from(a[i] * b[i]) * f64::from(c[i]);
        }
    }
    let mut sum = sum_lanes(lanes);
    for ((&a, &b), &c) in a_rest.iter().zip(b_rest).zip(c_rest) {
        sum += f64::from(a * b) * f64::from(c);
    }
    sum
}

/// Threads split the columns, so each sums all rows in order.
pub(super) fn backward_weight(
    cpu: Cpu,
    dims: &RmsNormDims,
    dy: Rows<'_>,
    x: Rows<'_>,
    inv_rms: &[f32],
    accumulate: bool,
    dweight: &mut [f32],
) {
    let dweight = SharedMut::new(dweight);
    cpu.for_ranges(dims.width, 4 * LANES, |columns| {
        // SAFETY: for_ranges hands out disjoint ranges.
        let dweight = unsafe { dweight.range(columns.clone()) };
        let first = columns.start;
        dispatch!(
            cpu,
            weight_band,
            dims,
            dy,
            x,
            inv_rms,
            accumulate,
            first,
            dweight
        );
    });
}

#[inline(always)]
#[allow(clippy::too_many_arguments)] // the operands of one fused op
fn weight_band<S: Simd>(
    _: S,
    dims: &RmsNormDims,
    dy: Rows<'_>,
    x: Rows<'_>,
    inv_rms: &[f32],
    accumulate: bool,
    first: usize,
    dweight: &mut [f32],
) {
    const TILE: usize = 4 * LANES;
    for (tile, dweight) in dweight.chunks_mut(TILE).enumerate() {
        let column = first + tile * TILE;
        let mut lanes = [0f64; TILE];
        for t in 0..dims.tokens {
            let (dy, x) = (dy.row(t), x.row(t));
            for g in 0..dims.groups {
                let start = g * dims.width + column;
                let inv_rms = inv_rms[t * dims.groups + g];
                let (dy, x) = (&dy[start..][..dweight.len()], &x[start..][..dweight.len()]);
                if let (Ok(dy), Ok(x)) = (<&[f32; TILE]>::try_from(dy), <&[f32; TILE]>::try_from(x))
                {
                    for i in 0..TILE {
                        lanes[i] += f64::from(dy[i]) * f64::from(x[i] * inv_rms);
                    }
                } else {
                    for ((lane, &dy), &x) in lanes.iter_mut().zip(dy).zip(x) {
                        *lane += f64::from(dy) * f64::from(x * inv_rms);
                    }
                }
            }
        }
        for (sum, lane) in dweight.iter_mut().zip(lanes) {
            let kept = if accumulate { f64::from(*sum) } else { 0.0 };
            *sum = (kept + lane) as f32;
        }
    }
}

//! A row at a time, by tokens or by permuted rows.

use pulp::Simd;

use super::{Order, PermuteDims};
use crate::Cpu;
use crate::rows::SharedMut;
use crate::simd::dot_f64;

/// Rows below which a second thread does not pay.
const STEP: usize = 16;

/// Counting sort, stable.
pub(super) fn sort(experts: &[u32], offsets: &mut [usize], slots: &mut [u32], rows: &mut [u32]) {
    // First offsets[e + 1] counts the rows of e, then it is where the next row of e goes, in the end where
    // the rows of e end.
    offsets.fill(0);
    for &e in experts {
        offsets[e as usize + 1] += 1;
    }
    let mut start = 0;
    for next in offsets.iter_mut().skip(1) {
        (start, *next) = (start + *next, start);
    }
    for (slot, &e) in experts.iter().enumerate() {
        let next = &mut offsets[e as usize + 1];
        slots[*next] = slot as u32;
        rows[slot] = *next as u32;
        *next += 1;
    }
}

pub(super) fn permute(cpu: Cpu, dims: &PermuteDims, order: &Order<'_>, x: &[f32], y: &mut [f32]) {
    let (width, y) = (dims.width, SharedMut::new(y));
    cpu.for_ranges(dims.rows(), STEP, |rows| {
        // SAFETY: for_ranges hands out disjoint ranges of rows.
        let y = unsafe { y.range(rows.start * width..rows.end * width) };
        for (y, &slot) in y.chunks_mut(width.max(1)).zip(&order.slots[rows]) {
            y.copy_from_slice(&x[slot as usize / dims.top_k * width..][..width]);
        }
    });
}

pub(super) fn gather_sum(
    cpu: Cpu,
    dims: &PermuteDims,
    order: &Order<'_>,
    y: &[f32],
    weights: Option<&[f32]>,
    accumulate: bool,
    out: &mut [f32],
) {
    let (width, out) = (dims.width, SharedMut::new(out));
    cpu.for_ranges(dims.tokens, STEP, |tokens| {
        // SAFETY: for_ranges hands out disjoint ranges of tokens.
        let out = unsafe { out.range(tokens.start * width..tokens.end * width) };
        let slots = tokens.start * dims.top_k..tokens.end * dims.top_k;
        let (rows, weights) = (&order.rows[slots.clone()], weights.map(|w| &w[slots]));
        dispatch!(cpu, sum_rows, dims, rows, y, weights, accumulate, out);
    });
}

#[inline(always)]
fn sum_rows<S: Simd>(
    _: S,
    dims: &PermuteDims,
    rows: &[u32],
    y: &[f32],
    weights: Option<&[f32]>,
    accumulate: bool,
    out: &mut [f32],
) {
    for (t, out) in out.chunks_mut(dims.width.max(1)).enumerate() {
        if !accumulate {
            out.fill(0.0);
        }
        for slot in t * dims.top_k..(t + 1) * dims.top_k {
            let row = &y[rows[slot] as usize * dims.width..];
            match weights {
                Some(weights) => add_scaled(weights[slot], row, out),
                None => add_scaled(1.0, row, out),
            }
        }
    }
}

#[inline(always)]
fn add_scaled(factor: f32, row: &[f32], out: &mut [f32]) {
    for (out, &x) in out.iter_mut().zip(row) {
        *out += factor * x;
    }
}

pub(super) fn unpermute_backward(
    cpu: Cpu,
    dims: &PermuteDims,
    order: &Order<'_>,
    inputs: (&[f32], &[f32], &[f32]),
    (dy, d_weights): (&mut [f32], &mut [f32]),
) {
    let (dy, d_weights) = (SharedMut::new(dy), SharedMut::new(d_weights));
    cpu.for_ranges(dims.rows(), STEP, |slots| {
        for slot in slots {
            let row = order.rows[slot] as usize;
            // SAFETY: every slot is visited once, and no two have the same row: the caller checked that each
            // is the slot of its row.
            let (dy, dw) = unsafe {
                (
                    dy.range(row * dims.width..(row + 1) * dims.width),
                    d_weights.range(slot..slot + 1),
                )
            };
            dispatch!(cpu, backward_row, dims, inputs, (row, slot), dy, &mut dw[0]);
        }
    });
}

#[inline(always)]
fn backward_row<S: Simd>(
    simd: S,
    dims: &PermuteDims,
    (dout, y, weights): (&[f32], &[f32], &[f32]),
    (row, slot): (usize, usize),
    dy: &mut [f32],
    dw: &mut f32,
) {
    let width = dims.width;
    let dout = &dout[slot / dims.top_k * width..][..width];
    *dw = dot_f64(simd, dout, &y[row * width..][..width]) as f32;
    for (dy, &d) in dy.iter_mut().zip(dout) {
        *dy = weights[slot] * d;
    }
}

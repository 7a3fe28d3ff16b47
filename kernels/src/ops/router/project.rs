//! Logits in f64, for a router that is to run in f64 from its first product on.

use pulp::Simd;

use super::RouterDims;
use crate::cuda::ops::router as device;
use crate::rows::SharedMut;
use crate::simd::{LANES, dot_f64};
use crate::{Cpu, On, check};

/// Tokens, or experts, below which a second thread does not pay.
const STEP: usize = 16;

/// logits = x W^T, with products and sums in f64.
#[track_caller]
pub fn project_f64<'on>(
    on: impl Into<On<'on>>,
    dims: &RouterDims,
    x: &[f32],          // [T, D]
    weight: &[f32],     // [X, D]
    logits: &mut [f64], // [T, X]
) {
    let width = width(dims, x, weight);
    check::len("logits", logits, dims.tokens * dims.experts);
    match on.into() {
        On::Cpu(cpu) => project(cpu, dims, width, x, weight, logits),
        On::Device(unified) => unified.run(|call| {
            let (x, weight, logits) = (call.input(x)?, call.input(weight)?, call.output(logits)?);
            device::project_f64(call.device(), dims, x, weight, logits)
        }),
    }
}

fn project(
    cpu: Cpu,
    dims: &RouterDims,
    width: usize,
    x: &[f32],
    weight: &[f32],
    logits: &mut [f64],
) {
    let logits = SharedMut::new(logits);
    cpu.for_ranges(dims.tokens, STEP, |tokens| {
        let all = tokens.start * dims.experts..tokens.end * dims.experts;
        // SAFETY: for_ranges hands out disjoint ranges of tokens.
        let logits = unsafe { logits.range(all) };
        let x = &x[tokens.start * width..tokens.end * width];
        dispatch!(cpu, project_rows, width, x, weight, logits);
    });
}

/// Adds dlogits W to dx, and dlogits^T x to dweight if it is wanted: products and sums in f64.
#[track_caller]
pub fn project_f64_backward<'on>(
    on: impl Into<On<'on>>,
    dims: &RouterDims,
    dlogits: &[f64],             // [T, X]
    x: &[f32],                   // [T, D]
    weight: &[f32],              // [X, D]
    dx: &mut [f32],              // [T, D]
    dweight: Option<&mut [f32]>, // [X, D]
) {
    let width = width(dims, x, weight);
    check::len("dlogits", dlogits, dims.tokens * dims.experts);
    check::len("dx", dx, x.len());
    if let Some(dweight) = &dweight {
        check::len("dweight", dweight, dims.experts * width);
    }
    let cpu = match on.into() {
        On::Cpu(cpu) => cpu,
        On::Device(unified) => {
            return unified.run(|call| {
                let (dlogits, x, weight) =
                    (call.input(dlogits)?, call.input(x)?, call.input(weight)?);
                let dx = call.output(dx)?;
                let dweight = dweight.map(|dweight| call.output(dweight)).transpose()?;
                device::project_f64_backward(call.device(), dims, dlogits, x, weight, dx, dweight)
            });
        }
    };
    let by_token = Strided {
        data: dlogits,
        row: dims.experts,
        col: 1,
    };
    add_products(cpu, width, by_token, weight, dx);
    if let Some(dweight) = dweight {
        let by_expert = Strided {
            data: dlogits,
            row: 1,
            col: dims.experts,
        };
        add_products(cpu, width, by_expert, x, dweight);
    }
}

#[track_caller]
fn width(dims: &RouterDims, x: &[f32], weight: &[f32]) -> usize {
    let width = weight.len() / dims.experts.max(1);
    check::len("weight", weight, dims.experts * width);
    check::len("x", x, dims.tokens * width);
    width
}

#[inline(always)]
fn project_rows<S: Simd>(simd: S, width: usize, x: &[f32], weight: &[f32], logits: &mut [f64]) {
    let experts = weight.len() / width.max(1);
    for (x, logits) in x
        .chunks(width.max(1))
        .zip(logits.chunks_mut(experts.max(1)))
    {
        for (logit, w) in logits.iter_mut().zip(weight.chunks(width)) {
            *logit = dot_f64(simd, x, w);
        }
    }
}

/// Element (i, j) is at `i * row + j * col`.
#[derive(Clone, Copy)]
struct Strided<'a> {
    data: &'a [f64],
    row: usize,
    col: usize,
}

/// Row i of `to` += sum over j of a(i, j) times row j of `from`.
fn add_products(cpu: Cpu, width: usize, a: Strided<'_>, from: &[f32], to: &mut [f32]) {
    let rows = to.len() / width.max(1);
    let to = SharedMut::new(to);
    cpu.for_ranges(rows, STEP, |rows| {
        // SAFETY: for_ranges hands out disjoint ranges of rows.
        let to = unsafe { to.range(rows.start * width..rows.end * width) };
        dispatch!(cpu, add_rows, width, a, rows.start, from, to);
    });
}

#[inline(always)]
fn add_rows<S: Simd>(
    _: S,
    width: usize,
    a: Strided<'_>,
    first: usize,
    from: &[f32],
    to: &mut [f32],
) {
    const TILE: usize = 4 * LANES;
    for (i, to) in to.chunks_mut(width.max(1)).enumerate() {
        for (tile, to) in to.chunks_mut(TILE).enumerate() {
            let mut sums = [0f64; TILE];
            for (j, from) in from.chunks(width).enumerate() {
                let factor = a.data[(first + i) * a.row + j * a.col];
                for (sum, &x) in sums.iter_mut().zip(&from[tile * TILE..]) {
                    *sum += factor * f64::from(x);
                }
            }
            for (to, sum) in to.iter_mut().zip(sums) {
                *to = (f64::from(*to) + sum) as f32;
            }
        }
    }
}

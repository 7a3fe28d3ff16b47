//! Root-mean-square norm (Zhang and Sennrich 2019), optionally fused with the residual addition before it.
//!
//! For every row x of D elements: inv_rms = 1 / sqrt(mean(x^2) + eps), y = x inv_rms w.
//! Mean and root are taken in f64, inv_rms is kept as f32 for the backward pass, the rest is f32.
//!
//! A token holds `groups` rows side by side: 1 for the norm of the residual stream, H or K for the norm of
//! q or k (Qwen3), where the width is E and all heads share w `[E]`. Rows may be bands of a wider buffer.
//!
//! Backward, with g = dy w: dx = inv_rms (g - x inv_rms^2 mean(g x)), dw = sum over rows of dy x inv_rms
//! (summed in f64, in row order). No scratch.

mod cpu;
pub mod reference;
#[cfg(test)]
mod tests;

use crate::cuda::ops::rms_norm as device;
use crate::{On, Rows, RowsMut, check};

/// Shape of the norm.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RmsNormDims {
    /// T.
    pub tokens: usize,
    /// Rows that a token holds side by side.
    pub groups: usize,
    /// Elements of a row: D, or E for a norm per head.
    pub width: usize,
    /// Added to the mean square.
    pub eps: f64,
}

impl RmsNormDims {
    /// One row of `width` a token.
    pub fn new(tokens: usize, width: usize, eps: f64) -> Self {
        Self::per_head(tokens, 1, width, eps)
    }

    /// `heads` rows of `head_dim` a token, normalised each for itself.
    pub fn per_head(tokens: usize, heads: usize, head_dim: usize, eps: f64) -> Self {
        Self {
            tokens,
            groups: heads,
            width: head_dim,
            eps,
        }
    }

    /// Number of rows, and of elements of inv_rms.
    pub fn rows(&self) -> usize {
        self.tokens * self.groups
    }
}

/// y = norm(x) w; fills inv_rms.
#[track_caller]
pub fn forward<'on>(
    on: impl Into<On<'on>>,
    dims: &RmsNormDims,
    x: Rows<'_>,         // [T, groups * width]
    weight: &[f32],      // [width]
    y: RowsMut<'_>,      // [T, groups * width]
    inv_rms: &mut [f32], // [T * groups]
) {
    check_rows(dims, "x", x.rows(), x.width());
    check_rows(dims, "y", y.rows(), y.width());
    check::len("weight", weight, dims.width);
    check::len("inv_rms", inv_rms, dims.rows());
    match on.into() {
        On::Cpu(cpu) => cpu::forward(cpu, dims, x, weight, y, inv_rms),
        On::Device(unified) => unified.run(|call| {
            let (x, weight) = (call.rows(x)?, call.input(weight)?);
            let (y, inv_rms) = (call.rows_mut(y)?, call.output(inv_rms)?);
            device::forward(call.device(), dims, x, weight, y, inv_rms)
        }),
    }
}

/// y = x inv_rms w with the inv_rms of an earlier [`forward`] or [`forward_residual`]: the y of that call, bit
/// for bit, for a caller that did not keep it.
#[track_caller]
pub fn apply<'on>(
    on: impl Into<On<'on>>,
    dims: &RmsNormDims,
    x: Rows<'_>,     // [T, groups * width]
    weight: &[f32],  // [width]
    inv_rms: &[f32], // [T * groups]
    y: RowsMut<'_>,  // [T, groups * width]
) {
    check_rows(dims, "x", x.rows(), x.width());
    check_rows(dims, "y", y.rows(), y.width());
    check::len("weight", weight, dims.width);
    check::len("inv_rms", inv_rms, dims.rows());
    match on.into() {
        On::Cpu(cpu) => cpu::apply(cpu, dims, x, weight, inv_rms, &y),
        On::Device(unified) => unified.run(|call| {
            let (x, weight) = (call.rows(x)?, call.input(weight)?);
            let (inv_rms, y) = (call.input(inv_rms)?, call.rows_mut(y)?);
            device::apply(call.device(), dims, x, weight, inv_rms, y)
        }),
    }
}

/// h = x + residual; y = norm(h) w; fills inv_rms. All contiguous, one group.
#[track_caller]
#[allow(clippy::too_many_arguments)] // the operands of one fused op
pub fn forward_residual<'on>(
    on: impl Into<On<'on>>,
    dims: &RmsNormDims,
    x: &[f32],           // [T, D]
    residual: &[f32],    // [T, D]
    weight: &[f32],      // [D]
    h: &mut [f32],       // [T, D]
    y: &mut [f32],       // [T, D]
    inv_rms: &mut [f32], // [T]
) {
    assert!(dims.groups == 1, "rms_norm with a residual has one group");
    let len = dims.tokens * dims.width;
    check::len("x", x, len);
    check::len("residual", residual, len);
    check::len("h", h, len);
    check::len("y", y, len);
    check::len("weight", weight, dims.width);
    check::len("inv_rms", inv_rms, dims.tokens);
    match on.into() {
        On::Cpu(cpu) => {
            cpu::forward_residual(cpu, dims, (x, residual), weight, (h, y), inv_rms);
        }
        On::Device(unified) => unified.run(|call| {
            let (x, residual, weight) =
                (call.input(x)?, call.input(residual)?, call.input(weight)?);
            let (h, y, inv_rms) = (call.output(h)?, call.output(y)?, call.output(inv_rms)?);
            device::forward_residual(call.device(), dims, x, residual, weight, h, y, inv_rms)
        }),
    }
}

/// dx and dw from dy, the x (or h) and inv_rms of the forward pass.
///
/// `accumulate_dx` adds to dx (the gradient that the residual stream brings), `accumulate_dw` to dw.
#[track_caller]
#[allow(clippy::too_many_arguments)] // the operands of one fused op
pub fn backward<'on>(
    on: impl Into<On<'on>>,
    dims: &RmsNormDims,
    dy: Rows<'_>,    // [T, groups * width]
    x: Rows<'_>,     // [T, groups * width]
    weight: &[f32],  // [width]
    inv_rms: &[f32], // [T * groups]
    accumulate_dx: bool,
    dx: RowsMut<'_>, // [T, groups * width]
    accumulate_dw: bool,
    dweight: &mut [f32], // [width]
) {
    check_rows(dims, "dy", dy.rows(), dy.width());
    check_rows(dims, "x", x.rows(), x.width());
    check_rows(dims, "dx", dx.rows(), dx.width());
    check::len("weight", weight, dims.width);
    check::len("dweight", dweight, dims.width);
    check::len("inv_rms", inv_rms, dims.rows());
    match on.into() {
        On::Cpu(cpu) => {
            cpu::backward_weight(cpu, dims, dy, x, inv_rms, accumulate_dw, dweight);
            cpu::backward_input(cpu, dims, (dy, x), weight, inv_rms, accumulate_dx, dx);
        }
        On::Device(unified) => unified.run(|call| {
            let (dy, x) = (call.rows(dy)?, call.rows(x)?);
            let (weight, inv_rms) = (call.input(weight)?, call.input(inv_rms)?);
            let (dx, dweight) = (call.rows_mut(dx)?, call.output(dweight)?);
            let (add_dx, add_dw) = (accumulate_dx, accumulate_dw);
            let device = call.device();
            device::backward(
                device, dims, dy, x, weight, inv_rms, add_dx, dx, add_dw, dweight,
            )
        }),
    }
}

#[track_caller]
fn check_rows(dims: &RmsNormDims, name: &str, rows: usize, width: usize) {
    let expected = (dims.tokens, dims.groups * dims.width);
    assert!(
        (rows, width) == expected,
        "rms_norm: {name} is [{rows}, {width}], the dimensions say {expected:?}"
    );
}

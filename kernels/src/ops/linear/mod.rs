//! Linear layer: y = x W^T + b, with weights as Hugging Face stores them.
//!
//! x `[T, D]`, W `[N, D]`, b `[N]`, y `[T, N]`; T tokens, D inputs, N outputs. All f32, sums in f32.
//!
//! | function | computes |
//! |---|---|
//! | [`forward`] | `y[t, n]` = sum_d `x[t, d]` `W[n, d]` + `b[n]` |
//! | [`backward_input`] | dx = dy W |
//! | [`backward_weight`] | dW = dy^T x |
//! | [`backward_bias`] | `db[n]` = sum_t `dy[t, n]` |
//!
//! x, y and their gradients may be bands of wider buffers ([`LinearDims::x_stride`]). `accumulate` adds to
//! the output instead of overwriting it. No scratch.

mod cpu;
pub mod reference;
#[cfg(test)]
mod tests;

use crate::cuda::ops::linear as device;
use crate::ops::gemm::{Gemm, gemm};
use crate::{On, Rows, RowsMut, check};

/// Shape of a linear layer over T tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinearDims {
    /// T.
    pub tokens: usize,
    /// D.
    pub inputs: usize,
    /// N.
    pub outputs: usize,
    /// Elements between the rows of x and dx; D when contiguous.
    pub x_stride: usize,
    /// Elements between the rows of y and dy; N when contiguous.
    pub y_stride: usize,
}

impl LinearDims {
    /// Contiguous x and y.
    pub fn new(tokens: usize, inputs: usize, outputs: usize) -> Self {
        Self {
            tokens,
            inputs,
            outputs,
            x_stride: inputs,
            y_stride: outputs,
        }
    }
}

/// y = x W^T + b. A slice of a band starts at the band's first element.
#[track_caller]
pub fn forward<'on>(
    on: impl Into<On<'on>>,
    dims: &LinearDims,
    x: &[f32],            // [T, D]
    weight: &[f32],       // [N, D]
    bias: Option<&[f32]>, // [N]
    y: &mut [f32],        // [T, N]
) {
    let LinearDims {
        tokens,
        inputs,
        outputs,
        ..
    } = *dims;
    check::len("weight", weight, outputs * inputs);
    let product = Gemm::nt(tokens, outputs, inputs).strides(dims.x_stride, inputs, dims.y_stride);
    let Some(bias) = bias else {
        return gemm(on, &product, x, weight, y);
    };
    check::len("bias", bias, outputs);
    match on.into() {
        On::Cpu(cpu) => {
            for t in 0..tokens {
                y[t * dims.y_stride..][..outputs].copy_from_slice(bias);
            }
            gemm(cpu, &product.accumulate(true), x, weight, y);
        }
        On::Device(unified) => unified.run(|call| {
            let x = call.rows(Rows::new(x, tokens, inputs, dims.x_stride))?;
            let weight = call.rows(Rows::new(weight, outputs, inputs, inputs))?;
            let bias = call.input(bias)?;
            let y = call.rows_mut(RowsMut::new(y, tokens, outputs, dims.y_stride))?;
            device::forward(call.device(), dims, x, weight, Some(bias), y)
        }),
    }
}

/// dx = dy W, added to dx if `accumulate`.
#[track_caller]
pub fn backward_input<'on>(
    on: impl Into<On<'on>>,
    dims: &LinearDims,
    dy: &[f32],     // [T, N]
    weight: &[f32], // [N, D]
    accumulate: bool,
    dx: &mut [f32], // [T, D]
) {
    check::len("weight", weight, dims.outputs * dims.inputs);
    let product = Gemm::nn(dims.tokens, dims.inputs, dims.outputs)
        .strides(dims.y_stride, dims.inputs, dims.x_stride)
        .accumulate(accumulate);
    gemm(on, &product, dy, weight, dx);
}

/// dW = dy^T x, added to dW if `accumulate`.
#[track_caller]
pub fn backward_weight<'on>(
    on: impl Into<On<'on>>,
    dims: &LinearDims,
    dy: &[f32], // [T, N]
    x: &[f32],  // [T, D]
    accumulate: bool,
    dweight: &mut [f32], // [N, D]
) {
    check::len("dweight", dweight, dims.outputs * dims.inputs);
    let product = Gemm::tn(dims.outputs, dims.inputs, dims.tokens)
        .strides(dims.y_stride, dims.x_stride, dims.inputs)
        .accumulate(accumulate);
    gemm(on, &product, dy, x, dweight);
}

/// db = column sums of dy, added to db if `accumulate`.
#[track_caller]
pub fn backward_bias<'on>(
    on: impl Into<On<'on>>,
    dims: &LinearDims,
    dy: &[f32], // [T, N]
    accumulate: bool,
    dbias: &mut [f32], // [N]
) {
    check::len("dbias", dbias, dims.outputs);
    let dy = Rows::new(dy, dims.tokens, dims.outputs, dims.y_stride);
    match on.into() {
        On::Cpu(cpu) => cpu::column_sums(cpu, dy, accumulate, dbias),
        On::Device(unified) => unified.run(|call| {
            let (dy, dbias) = (call.rows(dy)?, call.output(dbias)?);
            device::backward_bias(call.device(), dims, dy, accumulate, dbias)
        }),
    }
}

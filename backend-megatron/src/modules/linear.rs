//! Linear layers, y = x W^T + b, each a part of one that the tensor ranks share. x [T, D], W [N, D], b [N],
//! y [T, N]; D and N are this rank's.
//!
//! Column-parallel: all of x, part of y. Row-parallel: part of x, and y is the sum over ranks.

use drivetrain_core::{Result, plan::PlannedOp};
use drivetrain_kernels::ops::{
    gemm::{Gemm, gemm},
    linear::{self, LinearDims},
};

use super::{Context, planned};
use crate::{
    weights::{Buffers, Sums, TensorRef},
    workspace::Buffer,
};

/// A weight, perhaps several stacked, and their bias.
#[derive(Debug, Clone)]
pub(super) struct Linear {
    pub(super) weight: TensorRef,
    pub(super) bias: Option<TensorRef>,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
}

impl Linear {
    /// Column-parallel: y [T, N] of x [S, D].
    ///
    /// # Errors
    /// The communicator's.
    pub(super) fn column_forward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        x: &[f32],
    ) -> Result<Buffer> {
        let x = cx.gather(x, self.inputs)?;
        let mut y = cx.workspace.take(cx.packed.num_tokens() * self.outputs);
        let bias = self.bias.as_ref().map(|b| params.get(b));
        let weight = params.get(&self.weight);
        linear::forward(cx.cpu, &self.dims(cx), &x, weight, bias, &mut y);
        Ok(y)
    }

    /// The gradient of x, [S, D], from that of y, [T, N].
    ///
    /// # Errors
    /// The communicator's.
    pub(super) fn column_backward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        grads: &mut Sums,
        dy: &[f32],
        x: &[f32],
    ) -> Result<Buffer> {
        let x = cx.gather(x, self.inputs)?;
        let mut dx = cx.workspace.take(x.len());
        self.backward(cx, params, grads, dy, &x, &mut dx);
        drop(x);
        cx.reduce(dx, self.inputs)
    }

    /// Row-parallel: adds to `residual` [S, N] what x [T, D] makes. For layers without a bias.
    ///
    /// # Errors
    /// The communicator's.
    pub(super) fn row_forward_add(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        x: &[f32],
        residual: &mut [f32],
    ) -> Result<()> {
        debug_assert!(self.bias.is_none());
        let alone = cx.ranks.tensor.is_alone();
        let product = Gemm::nt(cx.packed.num_tokens(), self.outputs, self.inputs);
        let weight = params.get(&self.weight);
        if alone {
            gemm(cx.cpu, &product.accumulate(true), x, weight, residual);
            return Ok(());
        }
        let mut partial = cx.workspace.take(cx.packed.num_tokens() * self.outputs);
        gemm(cx.cpu, &product, x, weight, &mut partial);
        cx.reduce_add(partial, self.outputs, residual)
    }

    /// The gradient of x, [T, D], from that of y, [S, N].
    ///
    /// # Errors
    /// The communicator's.
    pub(super) fn row_backward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        grads: &mut Sums,
        dy: &[f32],
        x: &[f32],
    ) -> Result<Buffer> {
        let dy = cx.gather(dy, self.outputs)?;
        let mut dx = cx.workspace.take(x.len());
        self.backward(cx, params, grads, &dy, x, &mut dx);
        Ok(dx)
    }

    /// dx = dy W; adds dy^T x to dW and the column sums of dy to db, or sets them.
    fn backward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        grads: &mut Sums,
        dy: &[f32],     // [T, N]
        x: &[f32],      // [T, D]
        dx: &mut [f32], // [T, D]
    ) {
        let dims = self.dims(cx);
        let dweight = grads.get_mut(&self.weight);
        linear::backward_weight(cx.cpu, &dims, dy, x, cx.accumulate, dweight);
        if let Some(bias) = &self.bias {
            linear::backward_bias(cx.cpu, &dims, dy, cx.accumulate, grads.get_mut(bias));
        }
        linear::backward_input(cx.cpu, &dims, dy, params.get(&self.weight), false, dx);
    }

    /// Its product, which keeps nothing of its own.
    pub(super) fn plan(&self, module: String, tokens: usize) -> PlannedOp {
        planned("gemm", module, [tokens, self.outputs, self.inputs], 0)
    }

    fn dims(&self, cx: &Context<'_>) -> LinearDims {
        LinearDims::new(cx.packed.num_tokens(), self.inputs, self.outputs)
    }
}

//! A linear layer, y = x W^T + b. x [T, D], W [N, D], b [N], y [T, N].

use drivetrain_core::plan::PlannedOp;
use drivetrain_kernels::ops::{
    gemm::{Gemm, gemm},
    linear::{self, LinearDims},
};

use super::{Context, planned};
use crate::weights::{Buffers, TensorRef};

/// A weight, perhaps several stacked, and their bias.
#[derive(Debug, Clone)]
pub(super) struct Linear {
    pub(super) weight: TensorRef,
    pub(super) bias: Option<TensorRef>,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
}

impl Linear {
    /// y = x W^T + b.
    pub(super) fn forward(&self, cx: &Context<'_>, params: &Buffers, x: &[f32], y: &mut [f32]) {
        let bias = self.bias.as_ref().map(|b| params.get(b));
        let weight = params.get(&self.weight);
        linear::forward(cx.cpu, &self.dims(cx), x, weight, bias, y);
    }

    /// y += x W^T: the residual is in y. For layers without a bias.
    pub(super) fn forward_add(&self, cx: &Context<'_>, params: &Buffers, x: &[f32], y: &mut [f32]) {
        debug_assert!(self.bias.is_none());
        let product = Gemm::nt(cx.packed.num_tokens(), self.outputs, self.inputs);
        gemm(
            cx.cpu,
            &product.accumulate(true),
            x,
            params.get(&self.weight),
            y,
        );
    }

    /// dx = dy W; adds dy^T x to dW and the column sums of dy to db, or sets them.
    pub(super) fn backward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        grads: &mut Buffers,
        dy: &[f32],     // [T, N]
        x: &[f32],      // [T, D]
        dx: &mut [f32], // [T, D]
    ) {
        let dims = self.dims(cx);
        linear::backward_weight(
            cx.cpu,
            &dims,
            dy,
            x,
            cx.accumulate,
            grads.get_mut(&self.weight),
        );
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

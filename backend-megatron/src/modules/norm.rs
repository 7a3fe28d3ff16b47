//! RMSNorm over the model dim. x, y [S, D], this rank's rows of the residual stream.

use drivetrain_core::{Result, model::ModelSpec, plan::PlannedOp};
use drivetrain_kernels::{
    Rows, RowsMut,
    ops::rms_norm::{self, RmsNormDims},
};

use super::{Context, planned};
use crate::{
    tensor_parallel::TensorShape,
    weights::{Buffers, LayoutBuilder, Sums, TensorRef},
    workspace::Buffer,
};

/// A norm's weight [D].
#[derive(Debug, Clone)]
pub(super) struct Norm {
    pub(super) weight: TensorRef,
    pub(super) width: usize,
    pub(super) eps: f64,
}

/// What backward needs beside the input.
#[derive(Debug)]
pub(super) struct SavedNorm {
    inv_rms: Buffer, // [S]
}

impl Norm {
    /// Places the weight.
    ///
    /// # Errors
    /// `Defect` from the layout.
    pub(super) fn new(
        spec: &ModelSpec,
        name: &str,
        tensor: TensorShape,
        layout: &mut LayoutBuilder,
    ) -> Result<Self> {
        Ok(Self {
            weight: layout.place(&[name], tensor.redundant())?,
            width: spec.hidden_size,
            eps: spec.rms_norm_eps,
        })
    }

    /// y = norm(x) w, over as many rows as x has.
    pub(super) fn forward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        x: &[f32], // [S, D]
    ) -> (Buffer, SavedNorm) {
        let dims = self.dims(x);
        let mut y = cx.workspace.take(x.len());
        let mut inv_rms = cx.workspace.take(dims.rows());
        rms_norm::forward(
            cx.cpu,
            &dims,
            Rows::contiguous(x, self.width),
            params.get(&self.weight),
            RowsMut::contiguous(&mut y, self.width),
            &mut inv_rms,
        );
        (y, SavedNorm { inv_rms })
    }

    /// The same y once more, from what was kept.
    pub(super) fn again(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        saved: &SavedNorm,
        x: &[f32], // [S, D]
    ) -> Buffer {
        let mut y = cx.workspace.take(x.len());
        rms_norm::apply(
            cx.cpu,
            &self.dims(x),
            Rows::contiguous(x, self.width),
            params.get(&self.weight),
            &saved.inv_rms,
            RowsMut::contiguous(&mut y, self.width),
        );
        y
    }

    /// Adds the gradient of x to `dx`, where the residual stream's already is; adds or sets that of w.
    #[allow(clippy::too_many_arguments)] // the operands of one op
    pub(super) fn backward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        grads: &mut Sums,
        saved: &SavedNorm,
        dy: &[f32],     // [S, D]
        x: &[f32],      // [S, D]
        dx: &mut [f32], // [S, D]
    ) {
        rms_norm::backward(
            cx.cpu,
            &self.dims(x),
            Rows::contiguous(dy, self.width),
            Rows::contiguous(x, self.width),
            params.get(&self.weight),
            &saved.inv_rms,
            true,
            RowsMut::contiguous(dx, self.width),
            cx.accumulate,
            grads.get_mut(&self.weight),
        );
    }

    /// Keeps a number a row. Whoever runs it says what becomes of its input and its output.
    pub(super) fn plan(&self, module: String, rows: usize) -> PlannedOp {
        planned(
            "rms_norm",
            module,
            [rows, self.width, 1],
            rows * size_of::<f32>(),
        )
    }

    fn dims(&self, x: &[f32]) -> RmsNormDims {
        RmsNormDims::new(x.len() / self.width, self.width, self.eps)
    }
}

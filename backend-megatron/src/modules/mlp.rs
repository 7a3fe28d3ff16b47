//! SwiGLU: y = (silu(x Wg^T) x Wu^T) Wd^T, gate and up stacked in one column-parallel weight [2F, D], down
//! row-parallel [D, F]; F is this rank's.

use drivetrain_core::{Result, config::RecomputeModule, model::ModelSpec, plan::PlannedOp};

use super::{Context, Keep, Kept, linear::Linear, planned, swiglu};
use crate::{
    tensor_parallel::TensorShape,
    weights::{Buffers, LayoutBuilder, Sums},
    workspace::Buffer,
};

/// The two products and the activation between them.
#[derive(Debug, Clone)]
pub(super) struct Mlp {
    pub(super) gate_up: Linear,
    pub(super) down: Linear,
    pub(super) keep: Keep,
}

/// What backward needs beside the input; what is `None` is computed again.
#[derive(Debug)]
pub(super) struct SavedMlp {
    gate_up: Kept,            // [T, 2F]
    activation: Option<Kept>, // [T, F]
}

impl Mlp {
    /// Places the weights of layer `index`.
    ///
    /// # Errors
    /// `Defect` from the layout.
    pub(super) fn new(
        spec: &ModelSpec,
        (index, ffn_size): (usize, usize),
        tensor: TensorShape,
        keep: Keep,
        layout: &mut LayoutBuilder,
    ) -> Result<Self> {
        let name = |part: &str| format!("model.layers.{index}.mlp.{part}_proj.weight");
        let own = tensor.share(ffn_size).len();
        let mut linear = |names: &[&str], inputs, outputs| {
            Ok(Linear {
                weight: layout.stack(names)?,
                bias: None,
                inputs,
                outputs,
            })
        };
        Ok(Self {
            gate_up: linear(&[&name("gate"), &name("up")], spec.hidden_size, 2 * own)?,
            down: linear(&[&name("down")], own, spec.hidden_size)?,
            keep,
        })
    }

    /// Adds its output to `residual`.
    ///
    /// # Errors
    /// The communicator's.
    pub(super) fn forward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        x: &[f32],            // [S, D]
        residual: &mut [f32], // [S, D]
    ) -> Result<SavedMlp> {
        let gate_up = self.gate_up.column_forward(cx, params, x)?;
        let activation = swiglu::forward(cx, &gate_up, self.down.inputs);
        let gate_up = self.keep.keep(cx, gate_up);
        self.down
            .row_forward_add(cx, params, &activation, residual)?;
        let module = RecomputeModule::MlpActivation;
        Ok(SavedMlp {
            gate_up,
            activation: self.keep.keep_of(module, cx, activation),
        })
    }

    /// The gradient of x, [S, D].
    ///
    /// # Errors
    /// The communicator's.
    pub(super) fn backward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        grads: &mut Sums,
        saved: SavedMlp,
        dy: &[f32], // [S, D]
        x: &[f32],  // [S, D]
    ) -> Result<Buffer> {
        let f = self.down.inputs;
        let SavedMlp {
            gate_up,
            activation,
        } = saved;
        let gate_up = gate_up.widen(cx);
        let activation = match activation {
            Some(kept) => kept.widen(cx),
            None => swiglu::forward(cx, &gate_up, f),
        };
        let dactivation = self.down.row_backward(cx, params, grads, dy, &activation)?;
        drop(activation);
        let dgate_up = swiglu::backward(cx, &gate_up, &dactivation, f);
        drop((gate_up, dactivation));
        self.gate_up
            .column_backward(cx, params, grads, &dgate_up, x)
    }

    /// Its operations over `tokens` tokens.
    pub(super) fn plan(&self, module: &str, tokens: usize) -> Vec<PlannedOp> {
        let f = self.down.inputs;
        let mut gate_up = self.gate_up.plan(format!("{module}.gate_up_proj"), tokens);
        gate_up.saved_bytes = self.keep.bytes(tokens * 2 * f) as u64;
        let kept = match self.keep.drops(RecomputeModule::MlpActivation) {
            true => 0,
            false => self.keep.bytes(tokens * f),
        };
        vec![
            gate_up,
            planned(
                "swiglu",
                format!("{module}.activation"),
                [tokens, f, 1],
                kept,
            ),
            self.down.plan(format!("{module}.down_proj"), tokens),
        ]
    }
}

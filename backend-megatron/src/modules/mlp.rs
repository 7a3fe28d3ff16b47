//! SwiGLU: y = (silu(x Wg^T) x Wu^T) Wd^T, gate and up stacked in one weight [2F, D].

use drivetrain_core::{Result, model::ModelSpec, plan::PlannedOp};
use drivetrain_kernels::{Rows, RowsMut, ops::swiglu};

use super::{Context, linear::Linear, planned};
use crate::{
    weights::{Buffers, LayoutBuilder},
    workspace::Buffer,
};

/// The two products and the activation between them.
#[derive(Debug, Clone)]
pub(super) struct Mlp {
    pub(super) gate_up: Linear,
    pub(super) down: Linear,
}

/// What backward needs beside the input.
#[derive(Debug)]
pub(super) struct SavedMlp {
    gate_up: Buffer,    // [T, 2F]
    activation: Buffer, // [T, F]
}

impl Mlp {
    /// Places the weights of layer `index`.
    ///
    /// # Errors
    /// `Defect` from the layout.
    pub(super) fn new(
        spec: &ModelSpec,
        index: usize,
        ffn_size: usize,
        layout: &mut LayoutBuilder,
    ) -> Result<Self> {
        let name = |part: &str| format!("model.layers.{index}.mlp.{part}_proj.weight");
        let mut linear = |names: &[&str], inputs, outputs| {
            Ok(Linear {
                weight: layout.stack(names)?,
                bias: None,
                inputs,
                outputs,
            })
        };
        Ok(Self {
            gate_up: linear(
                &[&name("gate"), &name("up")],
                spec.hidden_size,
                2 * ffn_size,
            )?,
            down: linear(&[&name("down")], ffn_size, spec.hidden_size)?,
        })
    }

    /// Adds its output to `residual`.
    pub(super) fn forward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        x: &[f32],            // [T, D]
        residual: &mut [f32], // [T, D]
    ) -> SavedMlp {
        let (t, f) = (cx.packed.num_tokens(), self.down.inputs);
        let mut gate_up = cx.workspace.take(t * 2 * f);
        self.gate_up.forward(cx, params, x, &mut gate_up);
        let mut activation = cx.workspace.take(t * f);
        let bands = Rows::contiguous(&gate_up, 2 * f);
        swiglu::forward(
            cx.cpu,
            bands.columns(0..f),
            bands.columns(f..2 * f),
            &mut activation,
        );
        self.down.forward_add(cx, params, &activation, residual);
        SavedMlp {
            gate_up,
            activation,
        }
    }

    /// The gradient of x.
    pub(super) fn backward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        grads: &mut Buffers,
        saved: SavedMlp,
        dy: &[f32], // [T, D]
        x: &[f32],  // [T, D]
    ) -> Buffer {
        let (t, f) = (cx.packed.num_tokens(), self.down.inputs);
        let mut dactivation = cx.workspace.take(t * f);
        self.down
            .backward(cx, params, grads, dy, &saved.activation, &mut dactivation);
        drop(saved.activation);
        let mut dgate_up = cx.workspace.take(t * 2 * f);
        let bands = Rows::contiguous(&saved.gate_up, 2 * f);
        let [dgate, dup] = RowsMut::contiguous(&mut dgate_up, 2 * f).split_columns([f, f]);
        swiglu::backward(
            cx.cpu,
            &dactivation,
            bands.columns(0..f),
            bands.columns(f..2 * f),
            dgate,
            dup,
        );
        let mut dx = cx.workspace.take(t * self.gate_up.inputs);
        self.gate_up
            .backward(cx, params, grads, &dgate_up, x, &mut dx);
        dx
    }

    /// Its operations over `tokens` tokens.
    pub(super) fn plan(&self, module: &str, tokens: usize) -> Vec<PlannedOp> {
        let f = self.down.inputs;
        let mut gate_up = self.gate_up.plan(format!("{module}.gate_up_proj"), tokens);
        gate_up.saved_bytes = (tokens * 2 * f * size_of::<f32>()) as u64;
        vec![
            gate_up,
            planned(
                "swiglu",
                format!("{module}.activation"),
                [tokens, f, 1],
                tokens * f,
            ),
            self.down.plan(format!("{module}.down_proj"), tokens),
        ]
    }
}

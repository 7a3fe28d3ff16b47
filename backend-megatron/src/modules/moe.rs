//! Experts: each token goes through the SwiGLU of the k that the router chose, and gets the weighted sum of theirs.
//!
//! The rows of the residual stream are split over the tensor ranks on the way in, where they are not already
//! (sequence parallelism), so that M rows on each rank are routed once; see [`crate::expert_parallel`] for their way.

use drivetrain_core::{
    Result,
    config::{JobConfig, RecomputeModule},
    model::{Family, ModelSpec, MoeSpec},
    plan::PlannedOp,
};
use drivetrain_kernels::ops::{
    elementwise,
    grouped_gemm::{self, GroupedDims},
    permute::{self, PermuteDims},
};

use super::{
    Context, Keep, Kept, planned,
    router::{Routed, Router, RouterTally},
    swiglu,
};
use crate::{
    expert_parallel::{Dispatch, ExpertShape},
    weights::{Buffers, LayoutBuilder, Sums, TensorRef},
    workspace::Buffer,
};

/// Router and this rank's experts, X of them, of width F.
#[derive(Debug, Clone)]
pub(super) struct Moe {
    pub(super) router: Router,
    gate_up: TensorRef, // [X, 2F, D]
    down: TensorRef,    // [X, D, F]
    moe: MoeSpec,
    width: usize,
    ffn_size: usize,
    keep: Keep,
}

/// What backward needs beside the input, of R rows that came to this rank's experts.
#[derive(Debug)]
pub(super) struct SavedMoe {
    routed: Routed,
    dispatch: Dispatch,
    rows: Kept,               // [R, D]
    gate_up: Kept,            // [R, 2F]
    activation: Option<Kept>, // [R, F]; `None` is computed again
    results: Kept,            // [M k, D], of this rank's own rows
}

impl Moe {
    /// Places the weights of layer `index`.
    ///
    /// # Errors
    /// `Defect` from the layout.
    pub(super) fn new(
        (spec, moe): (&ModelSpec, MoeSpec),
        index: usize,
        shape: ExpertShape,
        (config, keep): (&JobConfig, Keep),
        layout: &mut LayoutBuilder,
    ) -> Result<Self> {
        let (part, names) = match spec.family {
            Family::Mixtral => ("block_sparse_moe", ["w1", "w3", "w2"]),
            _ => ("mlp", ["gate_proj", "up_proj", "down_proj"]),
        };
        let prefix = format!("model.layers.{index}.{part}");
        let experts = shape.experts(moe.num_experts);
        let name = |e: usize, m: &str| format!("{prefix}.experts.{e}.{m}.weight");
        let mut stack = |matrices: &[&str]| {
            let of = |e| matrices.iter().map(move |m| name(e, m));
            let names: Vec<String> = experts.clone().flat_map(of).collect();
            layout.stack(&names.iter().map(String::as_str).collect::<Vec<_>>())
        };
        Ok(Self {
            gate_up: stack(&names[..2])?,
            down: stack(&names[2..])?,
            router: Router::new(
                (spec, moe),
                index,
                config,
                &format!("{prefix}.gate.weight"),
                layout,
            )?,
            moe,
            width: spec.hidden_size,
            ffn_size: shape.width(moe.ffn_size),
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
        tally: &mut RouterTally,
    ) -> Result<SavedMoe> {
        let x = cx.distinct(x, self.width);
        let routed = self.router.forward(cx, params, x, tally)?;
        let dispatch = Dispatch::new(
            (cx.ranks.experts()?, cx.workspace),
            &routed.experts,
            self.moe.num_experts,
            self.width,
        )?;
        let dims = self.permute_dims(x);
        let mut sorted = cx.workspace.take(dims.rows() * self.width);
        permute::permute(cx.cpu, &dims, &dispatch.order(), x, &mut sorted);
        let rows = dispatch.scatter(cx, sorted)?;
        let mut gate_up = cx.workspace.take(self.rows(&rows) * 2 * self.ffn_size);
        let weight = params.get(&self.gate_up);
        grouped_gemm::forward(
            cx.cpu,
            &self.up_dims(&dispatch),
            &rows,
            weight,
            &mut gate_up,
        );
        let mut y = cx.workspace.take(rows.len());
        let rows = self.keep.keep(cx, rows);
        let activation = swiglu::forward(cx, &gate_up, self.ffn_size);
        let gate_up = self.keep.keep(cx, gate_up);
        let weight = params.get(&self.down);
        grouped_gemm::forward(
            cx.cpu,
            &self.down_dims(&dispatch),
            &activation,
            weight,
            &mut y,
        );
        let results = dispatch.combine(cx, y)?;
        let (order, weights) = (dispatch.order(), &routed.weights);
        if cx.has_distinct_rows() {
            permute::unpermute(cx.cpu, &dims, &order, &results, weights, true, residual);
        } else {
            let mut out = cx.workspace.take(x.len());
            permute::unpermute(cx.cpu, &dims, &order, &results, weights, false, &mut out);
            elementwise::add_assign(cx.cpu, residual, &cx.join(&out, self.width)?);
        }
        let module = RecomputeModule::MoeActivation;
        Ok(SavedMoe {
            routed,
            dispatch,
            rows,
            gate_up,
            activation: self.keep.keep_of(module, cx, activation),
            results: self.keep.keep(cx, results),
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
        saved: SavedMoe,
        dy: &[f32], // [S, D]
        x: &[f32],  // [S, D]
    ) -> Result<Buffer> {
        let SavedMoe {
            routed,
            dispatch,
            rows,
            gate_up,
            activation,
            results,
        } = saved;
        let (x, dy) = (cx.distinct(x, self.width), cx.distinct(dy, self.width));
        let (dims, order) = (self.permute_dims(x), dispatch.order());
        let results = results.widen(cx);
        let mut dresults = cx.workspace.take(results.len());
        let mut d_weights = cx.workspace.take(routed.weights.len());
        permute::unpermute_backward(
            cx.cpu,
            &dims,
            &order,
            dy,
            &results,
            &routed.weights,
            &mut dresults,
            &mut d_weights,
        );
        drop(results);
        let dout = dispatch.scatter(cx, dresults)?;
        let (rows, gate_up) = (rows.widen(cx), gate_up.widen(cx));
        let activation = match activation {
            Some(kept) => kept.widen(cx),
            None => swiglu::forward(cx, &gate_up, self.ffn_size),
        };
        let drows = self.experts_backward(
            cx,
            params,
            grads,
            &dispatch,
            (&rows, &gate_up, activation),
            dout,
        );
        drop((rows, gate_up));
        let dsorted = dispatch.combine(cx, drows)?;
        let mut dx = cx.workspace.take(x.len());
        permute::permute_backward(cx.cpu, &dims, &order, &dsorted, false, &mut dx);
        drop(dsorted);
        self.router
            .backward(cx, params, grads, &routed, &d_weights, x, &mut dx);
        match cx.has_distinct_rows() {
            true => Ok(dx),
            false => cx.join(&dx, self.width),
        }
    }

    /// The gradient of the rows, [R, D]: this rank's part of it.
    fn experts_backward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        grads: &mut Sums,
        dispatch: &Dispatch,
        (rows, gate_up, activation): (&[f32], &[f32], Buffer),
        dout: Buffer, // [R, D]
    ) -> Buffer {
        let add = cx.accumulate;
        let dims = self.down_dims(dispatch);
        let mut dactivation = cx.workspace.take(activation.len());
        let weight = params.get(&self.down);
        grouped_gemm::backward_input(cx.cpu, &dims, &dout, weight, false, &mut dactivation);
        let dweight = grads.get_mut(&self.down);
        grouped_gemm::backward_weight(cx.cpu, &dims, &dout, &activation, add, dweight);
        drop(activation);
        let dgate_up = swiglu::backward(cx, gate_up, &dactivation, self.ffn_size);
        drop(dactivation);
        let dims = self.up_dims(dispatch);
        let dweight = grads.get_mut(&self.gate_up);
        grouped_gemm::backward_weight(cx.cpu, &dims, &dgate_up, rows, add, dweight);
        let mut drows = dout;
        let weight = params.get(&self.gate_up);
        grouped_gemm::backward_input(cx.cpu, &dims, &dgate_up, weight, false, &mut drows);
        drows
    }

    fn rows(&self, rows: &[f32]) -> usize {
        rows.len() / self.width
    }

    fn permute_dims(&self, x: &[f32]) -> PermuteDims {
        PermuteDims {
            tokens: self.rows(x),
            top_k: self.moe.experts_per_token,
            width: self.width,
        }
    }

    fn up_dims<'a>(&self, dispatch: &'a Dispatch) -> GroupedDims<'a> {
        GroupedDims {
            offsets: dispatch.offsets(),
            inputs: self.width,
            outputs: 2 * self.ffn_size,
        }
    }

    fn down_dims<'a>(&self, dispatch: &'a Dispatch) -> GroupedDims<'a> {
        GroupedDims {
            offsets: dispatch.offsets(),
            inputs: self.ffn_size,
            outputs: self.width,
        }
    }

    /// Its operations over `rows` rows, if every rank's experts get as many.
    pub(super) fn plan(&self, module: &str, rows: usize) -> Vec<PlannedOp> {
        let (d, f) = (self.width, self.ffn_size);
        let sent = rows * self.moe.experts_per_token;
        let bytes = |elements| self.keep.bytes(elements);
        let kept = match self.keep.drops(RecomputeModule::MoeActivation) {
            true => 0,
            false => bytes(sent * f),
        };
        let name = |part: &str| format!("{module}.experts.{part}");
        let mut ops = self.router.plan(module, rows);
        ops.extend([
            planned(
                "grouped_gemm",
                name("gate_up"),
                [sent, 2 * f, d],
                bytes(sent * (d + 2 * f)),
            ),
            planned("swiglu", name("activation"), [sent, f, 1], kept),
            planned("grouped_gemm", name("down"), [sent, d, f], bytes(sent * d)),
        ]);
        ops
    }
}

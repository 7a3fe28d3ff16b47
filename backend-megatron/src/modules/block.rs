//! One transformer block: x += attention(norm(x)); x += mlp(norm(x)).

use drivetrain_core::{
    Result,
    model::{LayerSpec, ModelSpec},
    plan::PlannedOp,
};

use super::{
    Context,
    attention::{Attention, SavedAttention},
    mlp::{Mlp, SavedMlp},
    norm::{Norm, SavedNorm},
};
use crate::{
    weights::{Buffers, LayoutBuilder},
    workspace::Buffer,
};

/// A block's modules and where its bucket is.
#[derive(Debug, Clone)]
pub(crate) struct Block {
    pub(super) index: usize,
    pub(super) bucket: usize,
    pub(super) input_norm: Norm,
    pub(super) attention: Attention,
    pub(super) mlp_norm: Norm,
    pub(super) mlp: Mlp,
}

/// What a block keeps from forward to backward.
#[derive(Debug)]
pub(crate) struct SavedBlock {
    x: Buffer, // [T, D], the block's input
    input_norm: SavedNorm,
    normed: Buffer, // [T, D], attention's input
    attention: SavedAttention,
    middle: Buffer, // [T, D], the residual stream between the two parts
    mlp_norm: SavedNorm,
    mlp_normed: Buffer, // [T, D], the feed-forward part's input
    mlp: SavedMlp,
}

impl Block {
    /// Places layer `index` in a bucket of its own.
    ///
    /// # Errors
    /// `Defect` from the layout.
    pub(crate) fn new(
        spec: &ModelSpec,
        index: usize,
        layer: &LayerSpec,
        ffn_size: usize,
        layout: &mut LayoutBuilder,
    ) -> Result<Self> {
        let bucket = layout.start_bucket();
        let name = |part: &str| format!("model.layers.{index}.{part}.weight");
        Ok(Self {
            index,
            bucket,
            input_norm: Norm::new(spec, &name("input_layernorm"), layout)?,
            attention: Attention::new(spec, index, layer.sliding_window, layout)?,
            mlp_norm: Norm::new(spec, &name("post_attention_layernorm"), layout)?,
            mlp: Mlp::new(spec, index, ffn_size, layout)?,
        })
    }

    /// The residual stream after the block, from that before it. [T, D] both.
    pub(crate) fn forward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        x: Buffer, // [T, D]
    ) -> (Buffer, SavedBlock) {
        let (normed, input_norm) = self.input_norm.forward(cx, params, &x);
        let mut middle = cx.workspace.copy(&x);
        let attention = self.attention.forward(cx, params, &normed, &mut middle);
        let (mlp_normed, mlp_norm) = self.mlp_norm.forward(cx, params, &middle);
        let mut y = cx.workspace.copy(&middle);
        let mlp = self.mlp.forward(cx, params, &mlp_normed, &mut y);
        let saved = SavedBlock {
            x,
            input_norm,
            normed,
            attention,
            middle,
            mlp_norm,
            mlp_normed,
            mlp,
        };
        (y, saved)
    }

    /// Turns the gradient of the stream after the block into that before it, in place.
    pub(crate) fn backward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        grads: &mut Buffers,
        saved: SavedBlock,
        dx: &mut [f32], // [T, D]
    ) {
        let dnormed = self
            .mlp
            .backward(cx, params, grads, saved.mlp, dx, &saved.mlp_normed);
        drop(saved.mlp_normed);
        self.mlp_norm.backward(
            cx,
            params,
            grads,
            &saved.mlp_norm,
            &dnormed,
            &saved.middle,
            dx,
        );
        drop((dnormed, saved.middle));
        let dnormed =
            self.attention
                .backward(cx, params, grads, saved.attention, dx, &saved.normed);
        self.input_norm
            .backward(cx, params, grads, &saved.input_norm, &dnormed, &saved.x, dx);
    }

    /// The bucket that is complete when `backward` returns.
    pub(crate) fn bucket(&self) -> usize {
        self.bucket
    }

    /// Its operations over `tokens` tokens.
    pub(crate) fn plan(&self, tokens: usize) -> Vec<PlannedOp> {
        let name = |module: &str| format!("layers.{}.{module}", self.index);
        let residual = (tokens * self.input_norm.width * size_of::<f32>()) as u64;
        let mut input_norm = self.input_norm.plan(name("input_norm"), tokens);
        input_norm.saved_bytes += residual;
        let mut mlp_norm = self.mlp_norm.plan(name("mlp_norm"), tokens);
        mlp_norm.saved_bytes += residual;
        let mut ops = vec![input_norm];
        ops.extend(self.attention.plan(&name("attention"), tokens));
        ops.push(mlp_norm);
        ops.extend(self.mlp.plan(&name("mlp"), tokens));
        ops
    }
}

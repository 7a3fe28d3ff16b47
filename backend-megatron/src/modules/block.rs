//! One transformer block: x += attention(norm(x)); x += mlp(norm(x)).

use drivetrain_core::{
    Error, ErrorKind, Result,
    config::{JobConfig, RecomputeModule},
    model::{MlpSpec, ModelSpec},
    plan::PlannedOp,
    trace,
};

use super::{
    Context, Keep, Kept, RouterTally,
    attention::{Attention, SavedAttention},
    mlp::{Mlp, SavedMlp},
    moe::{Moe, SavedMoe},
    norm::{Norm, SavedNorm},
};
use crate::{
    model::missing,
    ranks::RankShape,
    weights::{Buffers, LayoutBuilder, Sums},
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
    pub(super) feed_forward: FeedForward,
    pub(super) keep: Keep,
}

/// The feed-forward part.
#[derive(Debug, Clone)]
pub(super) enum FeedForward {
    Dense(Mlp),
    Experts(Box<Moe>),
}

#[derive(Debug)]
enum SavedFeedForward {
    Dense(SavedMlp),
    Experts(Box<SavedMoe>),
}

/// What a block keeps from forward to backward.
#[derive(Debug)]
pub(crate) enum SavedBlock {
    /// Its input [S, D] alone: all else is computed again.
    Input(Kept),
    /// What its modules keep.
    Parts(Box<Parts>),
}

/// What is `None` is computed again.
#[derive(Debug)]
pub(crate) struct Parts {
    x: Kept, // [S, D], the block's input
    input_norm: SavedNorm,
    normed: Option<Kept>, // [S, D], attention's input
    attention: SavedAttention,
    middle: Kept, // [S, D], the residual stream between the two parts
    mlp_norm: SavedNorm,
    mlp_normed: Option<Kept>, // [S, D], the feed-forward part's input
    feed_forward: SavedFeedForward,
}

impl Block {
    /// Places layer `index` in a bucket of its own: norms last, which have other holders under tensor parallelism.
    ///
    /// # Errors
    /// `Defect` from the layout.
    pub(crate) fn new(
        spec: &ModelSpec,
        index: usize,
        shape: RankShape,
        config: &JobConfig,
        layout: &mut LayoutBuilder,
    ) -> Result<Self> {
        let (tensor, keep) = (shape.tensor, Keep::of_layer(config, index));
        let bucket = layout.start_bucket();
        let name = |part: &str| format!("model.layers.{index}.{part}.weight");
        let attention = Attention::new(spec, index, tensor, keep.clone(), layout)?;
        let own = keep.clone();
        let feed_forward = match (spec.layers[index].mlp, spec.moe) {
            (MlpSpec::Dense { ffn_size }, _) => {
                let size = (index, ffn_size);
                FeedForward::Dense(Mlp::new(spec, size, tensor, own, layout)?)
            }
            (MlpSpec::Moe, Some(moe)) => {
                let moe = Moe::new((spec, moe), index, shape.experts, (config, own), layout)?;
                FeedForward::Experts(Box::new(moe))
            }
            (MlpSpec::Moe, None) => {
                let message = "a layer has experts, and the model does not say which";
                return Err(Error::new(ErrorKind::Defect, "build_model", message));
            }
        };
        let mut norm = |part| Norm::new(spec, &name(part), tensor, layout);
        Ok(Self {
            index,
            bucket,
            input_norm: norm("input_layernorm")?,
            attention,
            mlp_norm: norm("post_attention_layernorm")?,
            feed_forward,
            keep,
        })
    }

    /// The residual stream after the block, from that before it. [S, D] both.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn forward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        x: Buffer, // [S, D]
        tally: &mut RouterTally,
    ) -> Result<(Buffer, SavedBlock)> {
        params.settle(self.bucket)?;
        let _span = trace::compute_layer("block forward", self.index);
        let (y, parts) = self.parts(cx, params, x, tally)?;
        let saved = match self.keep.full {
            true => SavedBlock::Input(parts.x),
            false => SavedBlock::Parts(Box::new(parts)),
        };
        Ok((y, saved))
    }

    fn parts(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        x: Buffer,
        tally: &mut RouterTally,
    ) -> Result<(Buffer, Parts)> {
        let module = RecomputeModule::Norm;
        let (normed, input_norm) = self.input_norm.forward(cx, params, &x);
        let (x, mut middle) = self.keep.fork(cx, x);
        let span = trace::compute_layer("attention forward", self.index);
        let attention = self.attention.forward(cx, params, &normed, &mut middle)?;
        drop(span);
        let normed = self.keep.keep_of(module, cx, normed);
        let (mlp_normed, mlp_norm) = self.mlp_norm.forward(cx, params, &middle);
        let (middle, mut y) = self.keep.fork(cx, middle);
        let span = trace::compute_layer("feed-forward forward", self.index);
        let feed_forward = match &self.feed_forward {
            FeedForward::Dense(mlp) => {
                SavedFeedForward::Dense(mlp.forward(cx, params, &mlp_normed, &mut y)?)
            }
            FeedForward::Experts(moe) => {
                let saved = moe.forward(cx, params, &mlp_normed, &mut y, tally)?;
                SavedFeedForward::Experts(Box::new(saved))
            }
        };
        drop(span);
        let parts = Parts {
            x,
            input_norm,
            normed,
            attention,
            middle,
            mlp_norm,
            mlp_normed: self.keep.keep_of(module, cx, mlp_normed),
            feed_forward,
        };
        Ok((y, parts))
    }

    /// Turns the gradient of the stream after the block into that before it, in place.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn backward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        grads: &mut Sums,
        saved: SavedBlock,
        dx: &mut [f32], // [S, D]
    ) -> Result<()> {
        let _span = trace::compute_layer("block backward", self.index);
        let parts = match saved {
            SavedBlock::Parts(parts) => *parts,
            SavedBlock::Input(x) => {
                let mut counted = cx.tally();
                self.parts(cx, params, x.widen(cx), &mut counted)?.1
            }
        };
        let middle = parts.middle.widen(cx);
        let mlp_normed = match parts.mlp_normed {
            Some(kept) => kept.widen(cx),
            None => self.mlp_norm.again(cx, params, &parts.mlp_norm, &middle),
        };
        let span = trace::compute_layer("feed-forward backward", self.index);
        let dnormed = match (&self.feed_forward, parts.feed_forward) {
            (FeedForward::Dense(mlp), SavedFeedForward::Dense(saved)) => {
                mlp.backward(cx, params, grads, saved, dx, &mlp_normed)?
            }
            (FeedForward::Experts(moe), SavedFeedForward::Experts(saved)) => {
                moe.backward(cx, params, grads, *saved, dx, &mlp_normed)?
            }
            _ => return Err(missing("what this layer kept")),
        };
        drop((mlp_normed, span));
        let saved = &parts.mlp_norm;
        self.mlp_norm
            .backward(cx, params, grads, saved, &dnormed, &middle, dx);
        drop((dnormed, middle));
        let x = parts.x.widen(cx);
        let normed = match parts.normed {
            Some(kept) => kept.widen(cx),
            None => self.input_norm.again(cx, params, &parts.input_norm, &x),
        };
        let span = trace::compute_layer("attention backward", self.index);
        let dnormed = self
            .attention
            .backward(cx, params, grads, parts.attention, dx, &normed)?;
        drop((normed, span));
        let saved = &parts.input_norm;
        self.input_norm
            .backward(cx, params, grads, saved, &dnormed, &x, dx);
        Ok(())
    }

    /// The bucket that is complete when `backward` returns.
    pub(crate) fn bucket(&self) -> usize {
        self.bucket
    }

    /// Its operations over `tokens` tokens, of which `rows` rows of the residual stream.
    pub(crate) fn plan(&self, tokens: usize, rows: usize) -> Vec<PlannedOp> {
        let name = |module: &str| format!("layers.{}.{module}", self.index);
        let residual = self.keep.bytes(rows * self.input_norm.width) as u64;
        let norm = |norm: &Norm, module| {
            let mut op = norm.plan(name(module), rows);
            // Its input, and its output.
            op.saved_bytes += residual;
            if !self.keep.drops(RecomputeModule::Norm) {
                op.saved_bytes += residual;
            }
            op
        };
        let mut ops = vec![norm(&self.input_norm, "input_norm")];
        ops.extend(self.attention.plan(&name("attention"), tokens));
        ops.push(norm(&self.mlp_norm, "mlp_norm"));
        match &self.feed_forward {
            FeedForward::Dense(mlp) => ops.extend(mlp.plan(&name("mlp"), tokens)),
            FeedForward::Experts(moe) => ops.extend(moe.plan(&name("moe"), rows)),
        }
        if self.keep.full {
            ops.iter_mut().for_each(|op| op.saved_bytes = 0);
            ops[0].saved_bytes = residual;
        }
        ops
    }
}

//! Token embedding: ids to rows of a table [V, D].

use drivetrain_core::{Result, model::ModelSpec, plan::PlannedOp};
use drivetrain_kernels::ops::embedding::{self, EmbeddingDims};

use super::{Context, planned};
use crate::{
    weights::{Buffers, LayoutBuilder, TensorRef},
    workspace::Buffer,
};

/// The table.
#[derive(Debug, Clone)]
pub(crate) struct Embedding {
    pub(crate) weight: TensorRef,
    pub(crate) vocab: usize,
    pub(crate) width: usize,
    /// Whether the head has the same table.
    pub(crate) tied: bool,
}

impl Embedding {
    /// Places the table in a bucket of its own.
    ///
    /// # Errors
    /// `Defect` from the layout.
    pub(crate) fn new(spec: &ModelSpec, layout: &mut LayoutBuilder) -> Result<Self> {
        layout.start_bucket();
        Ok(Self {
            weight: layout.stack(&["model.embed_tokens.weight"])?,
            vocab: spec.vocab_size,
            width: spec.hidden_size,
            tied: spec.tied_embeddings,
        })
    }

    /// The bucket that is complete when backward returns.
    pub(crate) fn bucket(&self) -> usize {
        self.weight.bucket
    }

    /// The hidden states of the micro-batch's tokens, [T, D].
    pub(crate) fn forward(&self, cx: &Context<'_>, params: &Buffers) -> Buffer {
        let dims = self.dims(cx);
        let mut x = cx.workspace.take(dims.tokens * dims.width);
        embedding::forward(
            cx.cpu,
            &dims,
            params.get(&self.weight),
            &cx.packed.tokens,
            &mut x,
        );
        x
    }

    /// Adds each row's gradient to its id's; to what the head wrote, where they are tied.
    pub(crate) fn backward(&self, cx: &Context<'_>, grads: &mut Buffers, dx: &[f32]) {
        let table = grads.get_mut(&self.weight);
        if !cx.accumulate && !self.tied {
            table.fill(0.0);
        }
        embedding::backward(cx.cpu, &self.dims(cx), dx, &cx.packed.tokens, table);
    }

    /// A look-up keeps nothing but its output, which is the first block's input.
    pub(crate) fn plan(&self, tokens: usize) -> PlannedOp {
        planned(
            "embedding",
            "embed_tokens".to_owned(),
            [tokens, self.width, 1],
            0,
        )
    }

    fn dims(&self, cx: &Context<'_>) -> EmbeddingDims {
        EmbeddingDims::whole(cx.packed.num_tokens(), self.vocab, self.width)
    }
}

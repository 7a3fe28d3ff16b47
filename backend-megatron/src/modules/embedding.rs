//! Token embedding: ids to rows of a table [V, D], whose rows the tensor ranks share (vocabulary-parallel).

use std::ops::Range;

use drivetrain_core::{Result, model::ModelSpec, plan::PlannedOp};
use drivetrain_kernels::ops::embedding::{self, EmbeddingDims};

use super::{Context, planned};
use crate::{
    tensor_parallel::TensorShape,
    weights::{Buffers, LayoutBuilder, Sums, TensorRef},
    workspace::Buffer,
};

/// This rank's rows of the table.
#[derive(Debug, Clone)]
pub(crate) struct Embedding {
    pub(crate) weight: TensorRef,
    /// Words of the whole vocabulary.
    pub(crate) vocab: usize,
    /// Ids of this rank's rows.
    pub(crate) ids: Range<usize>,
    pub(crate) width: usize,
    /// Whether a head on this rank has the same table, and adds its gradient first.
    pub(crate) shared: bool,
}

impl Embedding {
    /// Places the table in a bucket of its own.
    ///
    /// # Errors
    /// `Defect` from the layout.
    pub(crate) fn new(
        spec: &ModelSpec,
        tensor: TensorShape,
        shared: bool,
        layout: &mut LayoutBuilder,
    ) -> Result<Self> {
        layout.start_bucket();
        Ok(Self {
            weight: layout.stack(&["model.embed_tokens.weight"])?,
            vocab: spec.vocab_size,
            ids: tensor.share(spec.vocab_size),
            width: spec.hidden_size,
            shared,
        })
    }

    /// The bucket that is complete when backward returns.
    pub(crate) fn bucket(&self) -> usize {
        self.weight.bucket
    }

    /// The hidden states of the micro-batch's tokens, [S, D].
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn forward(&self, cx: &Context<'_>, params: &Buffers) -> Result<Buffer> {
        params.settle(self.weight.bucket)?;
        let dims = self.dims(cx);
        let mut x = cx.workspace.take(dims.tokens * dims.width);
        // A rank has zeros for the ids of the others.
        let table = params.get(&self.weight);
        embedding::forward(cx.cpu, &dims, table, &cx.packed.tokens, &mut x);
        cx.reduce(x, self.width)
    }

    /// Adds each row's gradient to its id's; to what the head wrote, where they share the table.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn backward(
        &self,
        cx: &Context<'_>,
        grads: &mut Sums,
        dx: &[f32], // [S, D]
    ) -> Result<()> {
        let dx = cx.gather(dx, self.width)?;
        let table = grads.get_mut(&self.weight);
        if !cx.accumulate && !self.shared {
            table.fill(0.0);
        }
        embedding::backward(cx.cpu, &self.dims(cx), &dx, &cx.packed.tokens, table);
        Ok(())
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
        EmbeddingDims {
            tokens: cx.packed.num_tokens(),
            vocab: self.vocab,
            first_id: self.ids.start,
            rows: self.ids.len(),
            width: self.width,
        }
    }
}

//! The root unit: embedding, final norm and head.

use drivetrain_core::model::{ModelSpec, ParameterKind, ParameterSpec};
use tch::{Kind, Tensor};

use super::Packed;
use crate::{
    error::Torch,
    shim::{self, rms_norm},
};

/// Where the root unit's parameters are among its tensors.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RootIndex {
    embedding: usize,
    norm: usize,
    head: usize,
}

impl RootIndex {
    /// Finds them; a tied head is the embedding.
    pub(crate) fn new(model: &ModelSpec, specs: &[ParameterSpec]) -> Option<Self> {
        let find = |kind| specs.iter().position(|s| s.kind == kind);
        let embedding = find(ParameterKind::Embedding)?;
        Some(Self {
            embedding,
            norm: find(ParameterKind::Norm)?,
            head: match model.tied_embeddings {
                true => embedding,
                false => find(ParameterKind::Head)?,
            },
        })
    }
}

/// The root's whole parameters.
#[derive(Debug)]
pub(crate) struct Root<'a> {
    index: RootIndex,
    eps: f64,
    parameters: &'a [Tensor],
}

impl<'a> Root<'a> {
    /// A root with these gathered parameters.
    pub(crate) fn new(index: RootIndex, eps: f64, parameters: &'a [Tensor]) -> Self {
        Self {
            index,
            eps,
            parameters,
        }
    }

    /// The tokens' embeddings, `[T, D]`.
    pub(crate) fn embed(&self, packed: &Packed) -> Torch<Tensor> {
        tch::no_grad(|| self.parameters[self.index.embedding].f_index_select(0, &packed.tokens))
    }

    /// The head's weight, `[V, D]`.
    pub(crate) fn head(&self) -> Tensor {
        self.parameters[self.index.head].detach()
    }

    /// What the head reads: the predictors' rows of `x` `[T, D]`, normalised, `[S, D]`.
    pub(crate) fn select_and_norm(&self, x: &Tensor, packed: &Packed) -> Torch<Normed> {
        let selected = x
            .f_index_select(0, &packed.predictors)?
            .f_set_requires_grad(true)?;
        let weight = &self.parameters[self.index.norm];
        let output = tch::with_grad(|| rms_norm(&selected, weight, self.eps))?;
        Ok(Normed {
            hidden: output.f_detach()?,
            selected,
            output,
        })
    }

    /// All-zero gradients of the root's parameters, in f32: rows of an embedding's and chunks of a head's add up there.
    pub(crate) fn zero_gradients(&self) -> Torch<Vec<Tensor>> {
        let zeros = |p: &Tensor| Tensor::f_zeros(p.size().as_slice(), (Kind::Float, p.device()));
        self.parameters.iter().map(zeros).collect()
    }

    /// The gradient that the head adds to.
    pub(crate) fn head_gradient<'g>(&self, gradients: &'g mut [Tensor]) -> &'g mut Tensor {
        &mut gradients[self.index.head]
    }

    /// Back through the norm and the selection: adds the norm weight's gradient, returns that of `x`, `[T, D]`.
    pub(crate) fn backward_norm(
        &self,
        normed: &Normed,
        d_hidden: &Tensor,
        packed: &Packed,
        gradients: &mut [Tensor],
    ) -> Torch<Tensor> {
        let weight = &self.parameters[self.index.norm];
        let found = shim::gradients(&[(&normed.output, d_hidden)], &[&normed.selected, weight])?;
        let _ = gradients[self.index.norm].f_add_(&found[1])?;
        let [num_tokens, dim] = [packed.num_tokens as i64, d_hidden.size()[1]];
        let mut d_x = Tensor::f_zeros([num_tokens, dim], (d_hidden.kind(), d_hidden.device()))?;
        // A predictor is scored once, so no row comes twice.
        d_x.f_index_copy_(0, &packed.predictors, &found[0])
    }

    /// Back through the embedding: adds its gradient, row by row.
    pub(crate) fn backward_embed(
        &self,
        d_x: &Tensor,
        packed: &Packed,
        gradients: &mut [Tensor],
    ) -> Torch<()> {
        let _ = gradients[self.index.embedding].f_index_add_(
            0,
            &packed.tokens,
            &d_x.f_to_kind(Kind::Float)?,
        )?;
        Ok(())
    }
}

/// The final norm over the scored rows, with its graph.
#[derive(Debug)]
pub(crate) struct Normed {
    /// The output, outside the graph, `[S, D]`.
    pub(crate) hidden: Tensor,
    selected: Tensor,
    output: Tensor,
}

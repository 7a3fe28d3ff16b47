//! The head: final norm, logits, and of these only the log-prob of each target and the entropy.
//!
//! Only the N scored rows are gathered, normalised and multiplied. Logits [N, V] live in one buffer of at most
//! `budget_bytes`, which backward turns into their gradient in place. Where they fit they are kept; beyond,
//! they are made chunk by chunk and made again in backward; and where the derivatives are known beforehand
//! each chunk is forward and backward at once.

use std::ops::Range;

use drivetrain_core::{Result, model::ModelSpec, plan::PlannedOp};
use drivetrain_kernels::ops::{
    cross_entropy::{self, CrossEntropyDims, Derivatives},
    embedding::{self, EmbeddingDims},
    linear::{self, LinearDims},
};

use super::{
    Context, Embedding,
    norm::{Norm, SavedNorm},
    planned,
};
use crate::{
    weights::{Buffers, LayoutBuilder, TensorRef},
    workspace::Buffer,
};

/// Final norm and output weight [V, D].
#[derive(Debug, Clone)]
pub(crate) struct Head {
    pub(super) norm: Norm,
    pub(super) weight: TensorRef,
    pub(super) vocab: usize,
    pub(super) budget_bytes: u64,
    pub(super) bucket: usize,
}

/// What is wanted of each scored position.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct HeadRequest {
    /// Divides the logits.
    pub(crate) temperature: f64,
    /// Whether entropies are wanted.
    pub(crate) entropy: bool,
}

/// A number a scored position, [N] each.
#[derive(Debug, Default)]
pub(crate) struct HeadOutputs {
    /// Log-probs of the targets.
    pub(crate) log_probs: Vec<f32>,
    /// Entropies, if wanted.
    pub(crate) entropy: Option<Vec<f32>>,
}

/// The loss's derivatives by [`HeadOutputs`].
#[derive(Debug)]
pub(crate) struct HeadGradients {
    pub(crate) log_probs: Vec<f32>,       // [N]
    pub(crate) entropy: Option<Vec<f32>>, // [N]
}

/// What backward needs.
#[derive(Debug)]
pub(crate) struct SavedHead {
    input: NormedRows,
    request: HeadRequest,
    outputs: Option<Vec<f32>>, // entropies [N]
    lse: Vec<f64>,             // [N]
    logits: Option<Buffer>,    // [N, V], where they fit
}

#[derive(Debug)]
struct NormedRows {
    gathered: Buffer, // [N, D]
    norm: SavedNorm,
    normed: Buffer, // [N, D]
}

impl Head {
    /// Places the final norm and, unless it is the embedding's, the output weight in a bucket of their own.
    ///
    /// # Errors
    /// `Defect` from the layout.
    pub(crate) fn new(
        spec: &ModelSpec,
        embedding: &Embedding,
        budget_bytes: u64,
        layout: &mut LayoutBuilder,
    ) -> Result<Self> {
        let bucket = layout.start_bucket();
        let norm = Norm::new(spec, "model.norm.weight", layout)?;
        let weight = if spec.tied_embeddings {
            embedding.weight.clone()
        } else {
            layout.stack(&[spec.head_name()])?
        };
        Ok(Self {
            norm,
            weight,
            vocab: spec.vocab_size,
            budget_bytes,
            bucket,
        })
    }

    /// Log-probs and entropies of the scored positions. `keep` keeps the logits if they fit.
    pub(crate) fn forward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        x: &[f32], // [T, D]
        request: HeadRequest,
        keep: bool,
    ) -> (HeadOutputs, SavedHead) {
        let n = cx.packed.num_scored();
        let input = self.gather(cx, params, x);
        let mut outputs = HeadOutputs::new(n, request);
        let mut lse = vec![0.0; n];
        let mut kept = None;
        for rows in self.chunks(n) {
            let logits = self.logits(cx, params, &input, rows.clone());
            self.score(cx, request, &logits, rows.clone(), &mut outputs, &mut lse);
            if keep && rows.len() == n {
                kept = Some(logits);
            }
        }
        let saved = SavedHead {
            input,
            request,
            outputs: outputs.entropy.clone(),
            lse,
            logits: kept,
        };
        (outputs, saved)
    }

    /// The gradient of x, [T, D].
    pub(crate) fn backward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        grads: &mut Buffers,
        mut saved: SavedHead,
        gradients: &HeadGradients,
    ) -> Buffer {
        let mut dnormed = cx.workspace.take(saved.input.normed.len());
        for rows in self.chunks(cx.packed.num_scored()) {
            let mut logits = match saved.logits.take() {
                Some(logits) => logits,
                None => self.logits(cx, params, &saved.input, rows.clone()),
            };
            self.differentiate(
                cx,
                saved.request,
                &mut logits,
                rows.clone(),
                gradients,
                (&saved.lse, saved.outputs.as_deref()),
            );
            self.carry(cx, params, grads, &saved.input, &logits, rows, &mut dnormed);
        }
        self.scatter(cx, params, grads, saved.input, &dnormed)
    }

    /// Both at once, for derivatives that do not depend on the outputs. The gradient of x, [T, D].
    pub(crate) fn forward_backward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        grads: &mut Buffers,
        x: &[f32], // [T, D]
        request: HeadRequest,
        gradients: &HeadGradients,
    ) -> (HeadOutputs, Buffer) {
        let n = cx.packed.num_scored();
        let input = self.gather(cx, params, x);
        let mut outputs = HeadOutputs::new(n, request);
        let mut lse = vec![0.0; n];
        let mut dnormed = cx.workspace.take(input.normed.len());
        for rows in self.chunks(n) {
            let mut logits = self.logits(cx, params, &input, rows.clone());
            self.score(cx, request, &logits, rows.clone(), &mut outputs, &mut lse);
            let statistics = (lse.as_slice(), outputs.entropy.as_deref());
            self.differentiate(
                cx,
                request,
                &mut logits,
                rows.clone(),
                gradients,
                statistics,
            );
            self.carry(cx, params, grads, &input, &logits, rows, &mut dnormed);
        }
        (outputs, self.scatter(cx, params, grads, input, &dnormed))
    }

    /// Its operations if every token is scored.
    pub(crate) fn plan(&self, tokens: usize) -> Vec<PlannedOp> {
        let kept = self.chunks(tokens).count() == 1;
        let logits = tokens * self.vocab * usize::from(kept);
        let mut norm = self.norm.plan("head.norm".to_owned(), tokens);
        norm.saved_bytes += (tokens * self.norm.width * size_of::<f32>()) as u64;
        vec![
            norm,
            planned(
                "gemm",
                "head.logits".to_owned(),
                [tokens, self.vocab, self.norm.width],
                logits,
            ),
            planned(
                "cross_entropy",
                "head.log_prob".to_owned(),
                [tokens, self.vocab, 1],
                2 * tokens,
            ),
        ]
    }

    /// The bucket that is complete when backward returns: not the embedding's, even if that holds the weight.
    pub(crate) fn bucket(&self) -> usize {
        self.bucket
    }

    /// Rows of logits that the budget holds; `check` made sure of one.
    fn chunks(&self, rows: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let fits = (self.budget_bytes / (self.vocab * size_of::<f32>()) as u64).max(1) as usize;
        (0..rows)
            .step_by(fits)
            .map(move |start| start..rows.min(start + fits))
    }

    fn gather(&self, cx: &Context<'_>, params: &Buffers, x: &[f32]) -> NormedRows {
        let mut gathered = cx.workspace.take(cx.packed.num_scored() * self.norm.width);
        embedding::forward(
            cx.cpu,
            &self.row_dims(cx),
            x,
            &cx.packed.rows,
            &mut gathered,
        );
        let (normed, norm) = self.norm.forward(cx, params, &gathered);
        NormedRows {
            gathered,
            norm,
            normed,
        }
    }

    fn logits(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        input: &NormedRows,
        rows: Range<usize>,
    ) -> Buffer {
        let mut logits = cx.workspace.take(rows.len() * self.vocab);
        let dims = self.linear_dims(rows.len());
        let hidden = &input.normed[self.span(&rows)];
        linear::forward(
            cx.cpu,
            &dims,
            hidden,
            params.get(&self.weight),
            None,
            &mut logits,
        );
        logits
    }

    fn score(
        &self,
        cx: &Context<'_>,
        request: HeadRequest,
        logits: &[f32], // [rows, V]
        rows: Range<usize>,
        outputs: &mut HeadOutputs,
        lse: &mut [f64],
    ) {
        cross_entropy::forward(
            cx.cpu,
            &self.loss_dims(request, rows.len()),
            logits,
            &cx.packed.targets[rows.clone()],
            &mut outputs.log_probs[rows.clone()],
            outputs.entropy.as_mut().map(|e| &mut e[rows.clone()]),
            &mut lse[rows],
        );
    }

    fn differentiate(
        &self,
        cx: &Context<'_>,
        request: HeadRequest,
        logits: &mut [f32], // [rows, V], turned into their gradient
        rows: Range<usize>,
        gradients: &HeadGradients,
        (lse, entropy): (&[f64], Option<&[f32]>),
    ) {
        let entropy = entropy.zip(gradients.entropy.as_deref());
        let derivatives = Derivatives {
            lse: &lse[rows.clone()],
            d_log_prob: &gradients.log_probs[rows.clone()],
            entropy: entropy.map(|(e, d)| (&e[rows.clone()], &d[rows.clone()])),
        };
        let dims = self.loss_dims(request, rows.len());
        let targets = &cx.packed.targets[rows];
        cross_entropy::backward_in_place(cx.cpu, &dims, logits, targets, &derivatives);
    }

    #[allow(clippy::too_many_arguments)] // the operands of one op
    fn carry(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        grads: &mut Buffers,
        input: &NormedRows,
        dlogits: &[f32], // [rows, V]
        rows: Range<usize>,
        dnormed: &mut [f32], // [N, D]
    ) {
        let (dims, span) = (self.linear_dims(rows.len()), self.span(&rows));
        let dweight = grads.get_mut(&self.weight);
        let hidden = &input.normed[span.clone()];
        let accumulate = cx.accumulate || rows.start > 0;
        linear::backward_weight(cx.cpu, &dims, dlogits, hidden, accumulate, dweight);
        let weight = params.get(&self.weight);
        linear::backward_input(cx.cpu, &dims, dlogits, weight, false, &mut dnormed[span]);
    }

    fn scatter(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        grads: &mut Buffers,
        input: NormedRows,
        dnormed: &[f32], // [N, D]
    ) -> Buffer {
        let mut dgathered = cx.workspace.zeros(dnormed.len());
        let norm = &self.norm;
        norm.backward(
            cx,
            params,
            grads,
            &input.norm,
            dnormed,
            &input.gathered,
            &mut dgathered,
        );
        let mut dx = cx.workspace.zeros(cx.packed.num_tokens() * norm.width);
        embedding::backward(
            cx.cpu,
            &self.row_dims(cx),
            &dgathered,
            &cx.packed.rows,
            &mut dx,
        );
        dx
    }

    fn row_dims(&self, cx: &Context<'_>) -> EmbeddingDims {
        EmbeddingDims::whole(
            cx.packed.num_scored(),
            cx.packed.num_tokens(),
            self.norm.width,
        )
    }

    fn linear_dims(&self, rows: usize) -> LinearDims {
        LinearDims::new(rows, self.norm.width, self.vocab)
    }

    fn loss_dims(&self, request: HeadRequest, rows: usize) -> CrossEntropyDims {
        CrossEntropyDims::whole(rows, self.vocab, request.temperature as f32)
    }

    fn span(&self, rows: &Range<usize>) -> Range<usize> {
        rows.start * self.norm.width..rows.end * self.norm.width
    }
}

impl HeadOutputs {
    /// Zeros for `n` positions.
    pub(crate) fn new(n: usize, request: HeadRequest) -> Self {
        Self {
            log_probs: vec![0.0; n],
            entropy: request.entropy.then(|| vec![0.0; n]),
        }
    }
}

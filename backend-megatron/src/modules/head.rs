//! The head: final norm, logits, and of these only the log-prob of each target and the entropy. Of the vocabulary
//! each tensor rank has V words, and four numbers a row are all that the ranks exchange (vocabulary-parallel).
//!
//! Only the N scored rows are gathered, normalised and multiplied. Logits [N, V] live in one buffer of at most
//! `budget_bytes`, which backward turns into their gradient in place. Where they fit they are kept; beyond,
//! they are made chunk by chunk and made again in backward; and where the derivatives are known beforehand
//! each chunk is forward and backward at once.

use std::ops::Range;

use drivetrain_core::{Result, model::ModelSpec, plan::PlannedOp, trace};
use drivetrain_kernels::ops::{
    cross_entropy::{self, CrossEntropyDims, Derivatives, PARTIALS},
    embedding::{self, EmbeddingDims},
    linear::{self, LinearDims},
};

use super::{
    Context,
    norm::{Norm, SavedNorm},
    planned,
};
use crate::{
    tensor_parallel::{Gathered, TensorShape},
    weights::{Buffers, LayoutBuilder, Sums, TensorRef},
    workspace::{Buffer, Lent},
};

/// Final norm and this rank's rows of the output weight, [V, D].
#[derive(Debug, Clone)]
pub(crate) struct Head {
    pub(super) norm: Norm,
    pub(super) weight: TensorRef,
    /// Words of the whole vocabulary.
    pub(super) vocab: usize,
    /// Ids of this rank's rows.
    pub(super) ids: Range<usize>,
    /// Rows of logits that the budget holds, the same on every tensor rank.
    pub(super) chunk_rows: usize,
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
    lse: Lent<f64>,            // [N]
    logits: Option<Buffer>,    // [N, V], where they fit
}

/// The scored rows. Where the residual stream's rows are split, each rank normalises its own, M of the N.
#[derive(Debug)]
struct NormedRows {
    gathered: Buffer, // [M, D]
    norm: SavedNorm,
    normed: Buffer, // [N, D]
}

impl Head {
    /// Places the final norm and, unless `shared` is the embedding's on this rank, the output weight in a bucket of
    /// their own.
    ///
    /// # Errors
    /// `Defect` from the layout.
    pub(crate) fn new(
        spec: &ModelSpec,
        shared: Option<&TensorRef>,
        budget_bytes: u64,
        tensor: TensorShape,
        layout: &mut LayoutBuilder,
    ) -> Result<Self> {
        let bucket = layout.start_bucket();
        let weight = match shared {
            Some(weight) => weight.clone(),
            None => layout.stack(&[spec.head_name()])?,
        };
        // `check` made sure of a row.
        let row_bytes = (spec.vocab_size.div_ceil(tensor.size) * size_of::<f32>()) as u64;
        Ok(Self {
            norm: Norm::new(spec, "model.norm.weight", tensor, layout)?,
            weight,
            vocab: spec.vocab_size,
            ids: tensor.share(spec.vocab_size),
            chunk_rows: (budget_bytes / row_bytes.max(1)).max(1) as usize,
            bucket,
        })
    }

    /// Log-probs and entropies of the scored positions. `keep` keeps the logits if they fit.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn forward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        x: &[f32], // [S, D]
        request: HeadRequest,
        keep: bool,
    ) -> Result<(HeadOutputs, SavedHead)> {
        let _span = trace::compute("head forward");
        let n = cx.packed.num_scored();
        let input = self.gather(cx, params, x)?;
        let mut outputs = HeadOutputs::new(n, request);
        let mut lse = cx.workspace.take_of::<f64>(n);
        let mut kept = None;
        for rows in self.chunks(n) {
            let logits = self.logits(cx, params, &input, rows.clone());
            self.score(cx, request, &logits, rows.clone(), &mut outputs, &mut lse)?;
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
        Ok((outputs, saved))
    }

    /// The gradient of x, [S, D].
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn backward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        grads: &mut Sums,
        mut saved: SavedHead,
        gradients: &HeadGradients,
    ) -> Result<Buffer> {
        let _span = trace::compute("head backward");
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
        self.scatter(cx, params, grads, saved.input, dnormed)
    }

    /// Both at once, for derivatives that do not depend on the outputs. The gradient of x, [S, D].
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn forward_backward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        grads: &mut Sums,
        x: &[f32], // [S, D]
        request: HeadRequest,
        gradients: &HeadGradients,
    ) -> Result<(HeadOutputs, Buffer)> {
        let _span = trace::compute("head forward and backward");
        let n = cx.packed.num_scored();
        let input = self.gather(cx, params, x)?;
        let mut outputs = HeadOutputs::new(n, request);
        let mut lse = cx.workspace.take_of::<f64>(n);
        let mut dnormed = cx.workspace.take(input.normed.len());
        for rows in self.chunks(n) {
            let mut logits = self.logits(cx, params, &input, rows.clone());
            self.score(cx, request, &logits, rows.clone(), &mut outputs, &mut lse)?;
            let statistics = (&*lse, outputs.entropy.as_deref());
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
        let dx = self.scatter(cx, params, grads, input, dnormed)?;
        Ok((outputs, dx))
    }

    /// Its operations if every token is scored.
    pub(crate) fn plan(&self, tokens: usize) -> Vec<PlannedOp> {
        let (kept, words) = (self.chunks(tokens).count() == 1, self.ids.len());
        let logits = tokens * words * usize::from(kept) * size_of::<f32>();
        let mut norm = self.norm.plan("head.norm".to_owned(), tokens);
        norm.saved_bytes += (2 * tokens * self.norm.width * size_of::<f32>()) as u64;
        vec![
            norm,
            planned(
                "gemm",
                "head.logits".to_owned(),
                [tokens, words, self.norm.width],
                logits,
            ),
            planned(
                "cross_entropy",
                "head.log_prob".to_owned(),
                [tokens, words, 1],
                tokens * size_of::<f64>(),
            ),
        ]
    }

    /// The bucket that is complete when backward returns: not the embedding's, even if that holds the weight.
    pub(crate) fn bucket(&self) -> usize {
        self.bucket
    }

    fn chunks(&self, rows: usize) -> impl Iterator<Item = Range<usize>> + use<> {
        let fits = self.chunk_rows;
        (0..rows)
            .step_by(fits)
            .map(move |start| start..rows.min(start + fits))
    }

    fn gather(&self, cx: &Context<'_>, params: &Buffers, x: &[f32]) -> Result<NormedRows> {
        params.settle(self.bucket)?;
        let rows = cx.own_scored_rows();
        let mut gathered = cx.workspace.take(rows.len() * self.norm.width);
        let dims = self.row_dims(&rows, x);
        embedding::forward(cx.cpu, &dims, x, &rows, &mut gathered);
        let (normed, norm) = self.norm.forward(cx, params, &gathered);
        let shares = (cx.packed.scored_shares.as_slice(), self.norm.width);
        let normed = match cx.ranks.tensor.gather(cx.workspace, &normed, shares)? {
            Gathered::All(all) => all,
            Gathered::Own(_) => normed,
        };
        Ok(NormedRows {
            gathered,
            norm,
            normed,
        })
    }

    fn logits(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        input: &NormedRows,
        rows: Range<usize>,
    ) -> Buffer {
        let mut logits = cx.workspace.take(rows.len() * self.ids.len());
        let dims = self.linear_dims(rows.len());
        let hidden = &input.normed[self.span(&rows)];
        let weight = params.get(&self.weight);
        linear::forward(cx.cpu, &dims, hidden, weight, None, &mut logits);
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
    ) -> Result<()> {
        let (dims, n) = (self.loss_dims(request, rows.len()), rows.len());
        let targets = &cx.packed.targets[rows.clone()];
        let log_probs = &mut outputs.log_probs[rows.clone()];
        let entropy = outputs.entropy.as_mut().map(|e| &mut e[rows.clone()]);
        let lse = &mut lse[rows];
        if cx.ranks.tensor.is_alone() {
            cross_entropy::forward(cx.cpu, &dims, logits, targets, log_probs, entropy, lse);
            return Ok(());
        }
        let wanted = request.entropy;
        let mut own = cx.workspace.take_of::<f64>(n * PARTIALS);
        cross_entropy::forward_partial(cx.cpu, &dims, logits, targets, wanted, &mut own);
        let group = cx.ranks.tensor.group();
        let counts = vec![own.len(); group.world_size()];
        let mut all = cx.workspace.take_of::<f64>(own.len() * counts.len());
        group
            .all_gather(own.give(), (&mut *all).into(), &counts)?
            .wait()?;
        cross_entropy::combine(n, &all, log_probs, entropy, lse);
        Ok(())
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
        grads: &mut Sums,
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
        grads: &mut Sums,
        input: NormedRows,
        dnormed: Buffer, // [N, D], this rank's words' part
    ) -> Result<Buffer> {
        if cx.packed.num_scored() == 0 && !cx.accumulate {
            // No row has written it.
            grads.get_mut(&self.weight).fill(0.0);
        }
        let norm = &self.norm;
        let shares = (cx.packed.scored_shares.as_slice(), norm.width);
        let dnormed = cx.ranks.tensor.reduce(cx.workspace, dnormed, shares)?;
        let mut dgathered = cx.workspace.zeros(dnormed.len());
        norm.backward(
            cx,
            params,
            grads,
            &input.norm,
            &dnormed,
            &input.gathered,
            &mut dgathered,
        );
        let mut dx = cx.workspace.zeros(cx.num_rows() * norm.width);
        let rows = cx.own_scored_rows();
        let dims = self.row_dims(&rows, &dx);
        embedding::backward(cx.cpu, &dims, &dgathered, &rows, &mut dx);
        Ok(dx)
    }

    /// Rows of x [S, D] as a table of which some are looked up.
    fn row_dims(&self, rows: &[u32], x: &[f32]) -> EmbeddingDims {
        let width = self.norm.width;
        EmbeddingDims::whole(rows.len(), x.len() / width, width)
    }

    fn linear_dims(&self, rows: usize) -> LinearDims {
        LinearDims::new(rows, self.norm.width, self.ids.len())
    }

    fn loss_dims(&self, request: HeadRequest, rows: usize) -> CrossEntropyDims {
        CrossEntropyDims {
            rows,
            vocab: self.vocab,
            first_id: self.ids.start,
            columns: self.ids.len(),
            temperature: request.temperature as f32,
        }
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

//! Output head and cross-entropy in one, so that the logits `[N, V]` never exist as a whole.
//!
//! hidden `[N, D]`, head W `[V, D]`: logits = hidden W^T in chunks of rows, each chunk then as in
//! [`crate::ops::cross_entropy`]. The chunk is as many rows as `scratch` holds, so the scratch
//! IS the memory budget, forward and backward alike ([`LinearCrossEntropyDims::scratch_len`]).
//!
//! - [`forward`] fills log_prob, entropy and lse (1 GEMM).
//! - [`backward`] computes the logits again and carries the derivatives to hidden and W (3 GEMMs).
//! - [`forward_backward`] does both in one pass where the derivative by log_prob is known up front, as for
//!   NLL (3 GEMMs in all).
//!
//! Weight gradients are summed over chunks in order, in f32.

pub mod reference;
#[cfg(test)]
mod tests;

use std::ops::Range;

use crate::ops::cross_entropy::{
    self, CrossEntropyDims, Derivatives, check_derivatives, check_targets, check_temperature,
};
use crate::ops::gemm::{Gemm, gemm};
use crate::{Cpu, check};

/// Shape of the head and of what is scored.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinearCrossEntropyDims {
    /// N: positions that are scored.
    pub rows: usize,
    /// D.
    pub width: usize,
    /// V.
    pub vocab: usize,
    /// As in cross_entropy.
    pub temperature: f32,
}

impl LinearCrossEntropyDims {
    /// Elements of scratch within a budget for the logits: whole rows, at least one, at most all.
    ///
    /// GEMMs are within 10% of their best from about 512 rows a chunk.
    pub fn scratch_len(&self, budget_bytes: usize) -> usize {
        let rows = budget_bytes / 4 / self.vocab.max(1);
        rows.clamp(1, self.rows.max(1)) * self.vocab
    }
}

/// Operands that every pass reads.
#[derive(Debug, Clone, Copy)]
pub struct HeadInputs<'a> {
    /// `[N, D]`.
    pub hidden: &'a [f32],
    /// W `[V, D]`.
    pub head: &'a [f32],
    /// `[N]`, each below V.
    pub targets: &'a [u32],
}

/// What the forward pass fills.
#[derive(Debug)]
pub struct HeadOutputs<'a> {
    /// `[N]`.
    pub log_prob: &'a mut [f32],
    /// `[N]`, if wanted.
    pub entropy: Option<&'a mut [f32]>,
    /// `[N]`.
    pub lse: &'a mut [f64],
}

/// Where gradients go.
#[derive(Debug)]
pub struct HeadGradients<'a> {
    /// `[N, D]`, overwritten.
    pub dhidden: &'a mut [f32],
    /// `[V, D]`.
    pub dhead: &'a mut [f32],
    /// Adds to dhead instead of overwriting it.
    pub accumulate_dhead: bool,
}

/// Fills log_prob, entropy if given, and lse.
///
/// # Panics
/// If a target is not below V, the temperature is not positive, or scratch holds no whole row.
#[track_caller]
pub fn forward(
    cpu: Cpu,
    dims: &LinearCrossEntropyDims,
    inputs: HeadInputs<'_>,
    mut outputs: HeadOutputs<'_>,
    scratch: &mut [f32],
) {
    check_inputs(dims, inputs, scratch);
    check_outputs(dims, &outputs);
    for chunk in Chunk::all(dims, scratch.len()) {
        let logits = chunk.logits(cpu, inputs, scratch);
        chunk.forward(cpu, inputs, &mut outputs, logits);
    }
}

/// Overwrites dhidden and fills or adds to dhead, from what [`forward`] saved.
///
/// # Panics
/// As [`forward`].
#[track_caller]
pub fn backward(
    cpu: Cpu,
    dims: &LinearCrossEntropyDims,
    inputs: HeadInputs<'_>,
    derivatives: &Derivatives<'_>,
    mut gradients: HeadGradients<'_>,
    scratch: &mut [f32],
) {
    check_inputs(dims, inputs, scratch);
    check_derivatives(dims.rows, derivatives);
    check_gradients(dims, &gradients);
    clear_if_overwritten(&mut gradients);
    for chunk in Chunk::all(dims, scratch.len()) {
        let logits = chunk.logits(cpu, inputs, scratch);
        let rows = chunk.rows.clone();
        let derivatives = Derivatives {
            lse: &derivatives.lse[rows.clone()],
            d_log_prob: &derivatives.d_log_prob[rows.clone()],
            entropy: derivatives
                .entropy
                .map(|(entropy, d)| (&entropy[rows.clone()], &d[rows.clone()])),
        };
        chunk.backward(cpu, inputs, &derivatives, &mut gradients, logits);
    }
}

/// [`forward`] and [`backward`] in one pass, for a derivative by log_prob that needs no forward value.
///
/// # Panics
/// As [`forward`].
#[track_caller]
pub fn forward_backward(
    cpu: Cpu,
    dims: &LinearCrossEntropyDims,
    inputs: HeadInputs<'_>,
    d_log_prob: &[f32], // [N]
    mut outputs: HeadOutputs<'_>,
    mut gradients: HeadGradients<'_>,
    scratch: &mut [f32],
) {
    check_inputs(dims, inputs, scratch);
    check_outputs(dims, &outputs);
    check_gradients(dims, &gradients);
    check::len("d_log_prob", d_log_prob, dims.rows);
    clear_if_overwritten(&mut gradients);
    for chunk in Chunk::all(dims, scratch.len()) {
        let logits = chunk.logits(cpu, inputs, scratch);
        chunk.forward(cpu, inputs, &mut outputs, logits);
        let derivatives = Derivatives {
            lse: &outputs.lse[chunk.rows.clone()],
            d_log_prob: &d_log_prob[chunk.rows.clone()],
            entropy: None,
        };
        chunk.backward(cpu, inputs, &derivatives, &mut gradients, logits);
    }
}

/// A range of rows whose logits fit the scratch.
struct Chunk<'a> {
    dims: &'a LinearCrossEntropyDims,
    rows: Range<usize>,
}

impl<'a> Chunk<'a> {
    fn all(
        dims: &'a LinearCrossEntropyDims,
        scratch_len: usize,
    ) -> impl Iterator<Item = Chunk<'a>> {
        let step = scratch_len / dims.vocab;
        // Equal chunks: a last chunk of a few rows would run its GEMMs slowly.
        let chunks = dims.rows.div_ceil(step);
        (0..chunks).map(move |i| Chunk {
            dims,
            rows: i * dims.rows / chunks..(i + 1) * dims.rows / chunks,
        })
    }

    fn logits<'s>(
        &self,
        cpu: Cpu,
        inputs: HeadInputs<'_>,
        scratch: &'s mut [f32],
    ) -> &'s mut [f32] {
        let logits = &mut scratch[..self.rows.len() * self.dims.vocab];
        let product = Gemm::nt(self.rows.len(), self.dims.vocab, self.dims.width);
        gemm(cpu, &product, self.hidden(inputs), inputs.head, logits);
        logits
    }

    fn forward(
        &self,
        cpu: Cpu,
        inputs: HeadInputs<'_>,
        outputs: &mut HeadOutputs<'_>,
        logits: &[f32],
    ) {
        cross_entropy::forward(
            cpu,
            &self.cross_entropy(),
            logits,
            &inputs.targets[self.rows.clone()],
            &mut outputs.log_prob[self.rows.clone()],
            outputs
                .entropy
                .as_mut()
                .map(|entropy| &mut entropy[self.rows.clone()]),
            &mut outputs.lse[self.rows.clone()],
        );
    }

    fn backward(
        &self,
        cpu: Cpu,
        inputs: HeadInputs<'_>,
        derivatives: &Derivatives<'_>,
        gradients: &mut HeadGradients<'_>,
        logits: &mut [f32],
    ) {
        let (rows, width) = (self.rows.clone(), self.dims.width);
        let targets = &inputs.targets[rows.clone()];
        let dims = self.cross_entropy();
        cross_entropy::backward_in_place(cpu, &dims, logits, targets, derivatives);
        let dhidden = &mut gradients.dhidden[rows.start * width..rows.end * width];
        let product = Gemm::nn(rows.len(), width, self.dims.vocab);
        gemm(cpu, &product, logits, inputs.head, dhidden);
        let product = Gemm::tn(self.dims.vocab, width, rows.len()).accumulate(true);
        gemm(cpu, &product, logits, self.hidden(inputs), gradients.dhead);
    }

    fn hidden<'h>(&self, inputs: HeadInputs<'h>) -> &'h [f32] {
        let width = self.dims.width;
        &inputs.hidden[self.rows.start * width..self.rows.end * width]
    }

    fn cross_entropy(&self) -> CrossEntropyDims {
        CrossEntropyDims {
            rows: self.rows.len(),
            vocab: self.dims.vocab,
            temperature: self.dims.temperature,
        }
    }
}

fn clear_if_overwritten(gradients: &mut HeadGradients<'_>) {
    if !gradients.accumulate_dhead {
        gradients.dhead.fill(0.0);
    }
}

#[track_caller]
fn check_inputs(dims: &LinearCrossEntropyDims, inputs: HeadInputs<'_>, scratch: &[f32]) {
    check_temperature(dims.temperature);
    check::len("hidden", inputs.hidden, dims.rows * dims.width);
    check::len("head", inputs.head, dims.vocab * dims.width);
    check_targets(dims.rows, dims.vocab, inputs.targets);
    check::at_least("scratch", scratch, dims.vocab.max(1));
}

#[track_caller]
fn check_outputs(dims: &LinearCrossEntropyDims, outputs: &HeadOutputs<'_>) {
    check::len("log_prob", outputs.log_prob, dims.rows);
    check::len("lse", outputs.lse, dims.rows);
    if let Some(entropy) = &outputs.entropy {
        check::len("entropy", entropy, dims.rows);
    }
}

#[track_caller]
fn check_gradients(dims: &LinearCrossEntropyDims, gradients: &HeadGradients<'_>) {
    check::len("dhidden", gradients.dhidden, dims.rows * dims.width);
    check::len("dhead", gradients.dhead, dims.vocab * dims.width);
}

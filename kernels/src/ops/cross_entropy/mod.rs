//! Log-probability of a target and entropy of a row of logits, with temperature.
//!
//! For every row x of logits `[V]` and z = x / temperature:
//!
//! - lse = log sum_j e^(z_j), log_prob = z_target - lse, entropy = -sum_j p_j log p_j in nats;
//! - d log_prob / d x_j = (1{j = target} - p_j) / temperature;
//! - d entropy / d x_j = -p_j (log p_j + entropy) / temperature.
//!
//! Logits are f32 and the forward pass never writes them. Row sums run in f64, so log_prob is the f64 value
//! rounded to f32, plus the error of one f32 exponential. lse is kept in f64, since an f32 lse of 40 would alone
//! spoil the sixth digit of every gradient. A logit of negative infinity is a token that cannot occur.
//! No scratch.

mod cpu;
pub mod reference;
#[cfg(test)]
mod tests;

use crate::rows::SharedMut;
use crate::{Cpu, check};

/// Shape of the logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CrossEntropyDims {
    /// N: positions that are scored.
    pub rows: usize,
    /// V.
    pub vocab: usize,
    /// Divides the logits before log-probability and entropy alike; above 0.
    pub temperature: f32,
}

/// Fills log_prob, lse, and entropy if given.
///
/// # Panics
/// If a target is not below V, or the temperature is not positive and finite.
#[track_caller]
pub fn forward(
    cpu: Cpu,
    dims: &CrossEntropyDims,
    logits: &[f32],              // [N, V]
    targets: &[u32],             // [N]
    log_prob: &mut [f32],        // [N]
    entropy: Option<&mut [f32]>, // [N]
    lse: &mut [f64],             // [N]
) {
    check_inputs(dims, logits, targets);
    check::len("log_prob", log_prob, dims.rows);
    check::len("lse", lse, dims.rows);
    if let Some(entropy) = &entropy {
        check::len("entropy", entropy, dims.rows);
    }
    cpu::forward(cpu, dims, logits, targets, log_prob, entropy, lse);
}

/// What the backward pass knows of every row: saved by [`forward`], and the derivatives to carry.
#[derive(Debug, Clone, Copy)]
pub struct Derivatives<'a> {
    /// Saved log-sum-exp `[N]`.
    pub lse: &'a [f64],
    /// Derivative of the loss by log_prob `[N]`.
    pub d_log_prob: &'a [f32],
    /// Saved entropy `[N]` and the derivative of the loss by it `[N]`, if the loss uses it.
    pub entropy: Option<(&'a [f32], &'a [f32])>,
}

/// Overwrites dlogits with the derivative of the loss by the logits.
///
/// A row whose derivatives are both zero gets zeros, whatever its logits hold.
///
/// # Panics
/// As [`forward`].
#[track_caller]
pub fn backward(
    cpu: Cpu,
    dims: &CrossEntropyDims,
    logits: &[f32],  // [N, V]
    targets: &[u32], // [N]
    derivatives: &Derivatives<'_>,
    dlogits: &mut [f32], // [N, V]
) {
    check_inputs(dims, logits, targets);
    check_derivatives(dims.rows, derivatives);
    check::len("dlogits", dlogits, logits.len());
    let dlogits = SharedMut::new(dlogits);
    cpu::for_row_gradients(cpu, dims, targets, derivatives, |row, gradient| {
        let span = row * dims.vocab..(row + 1) * dims.vocab;
        // SAFETY: every row is visited once.
        let out = unsafe { dlogits.range(span.clone()) };
        dispatch!(cpu, cpu::gradient_row, gradient, &logits[span], out);
    });
}

/// As [`backward`], turning the logits themselves into dlogits.
#[track_caller]
pub fn backward_in_place(
    cpu: Cpu,
    dims: &CrossEntropyDims,
    logits: &mut [f32], // [N, V]
    targets: &[u32],    // [N]
    derivatives: &Derivatives<'_>,
) {
    check_inputs(dims, logits, targets);
    check_derivatives(dims.rows, derivatives);
    let logits = SharedMut::new(logits);
    cpu::for_row_gradients(cpu, dims, targets, derivatives, |row, gradient| {
        // SAFETY: every row is visited once.
        let out = unsafe { logits.range(row * dims.vocab..(row + 1) * dims.vocab) };
        dispatch!(cpu, cpu::gradient_row_in_place, gradient, out);
    });
}

#[track_caller]
pub(crate) fn check_temperature(temperature: f32) {
    assert!(
        temperature > 0.0 && temperature.is_finite(),
        "cross_entropy: temperature {temperature} is not positive and finite"
    );
}

#[track_caller]
pub(crate) fn check_targets(rows: usize, vocab: usize, targets: &[u32]) {
    check::len("targets", targets, rows);
    if let Some(row) = targets.iter().position(|&t| t as usize >= vocab) {
        panic!(
            "cross_entropy: target {} of row {row} is not below the vocabulary of {vocab}",
            targets[row]
        );
    }
}

#[track_caller]
pub(crate) fn check_derivatives(rows: usize, derivatives: &Derivatives<'_>) {
    check::len("lse", derivatives.lse, rows);
    check::len("d_log_prob", derivatives.d_log_prob, rows);
    if let Some((entropy, d_entropy)) = derivatives.entropy {
        check::len("entropy", entropy, rows);
        check::len("d_entropy", d_entropy, rows);
    }
}

#[track_caller]
fn check_inputs(dims: &CrossEntropyDims, logits: &[f32], targets: &[u32]) {
    check_temperature(dims.temperature);
    check::len("logits", logits, dims.rows * dims.vocab);
    check_targets(dims.rows, dims.vocab, targets);
}

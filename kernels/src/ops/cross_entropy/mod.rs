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
//!
//! A vocabulary split over ranks (vocab-parallel; Shoeybi et al. 2019): each rank has some columns of the
//! logits, all ranks have the targets. [`forward_partial`] makes four numbers a row of the columns at hand,
//! [`combine`] turns those of all shards into log_prob, entropy and lse, in the order of the shards, so that
//! all ranks get the same bits. [`backward`] needs no more than the shard, lse and entropy.

mod cpu;
pub mod reference;
#[cfg(test)]
mod shard_tests;
#[cfg(test)]
mod tests;

use crate::cuda::ops::cross_entropy as device;
use crate::cuda::{Call, CudaError};
use crate::{On, check};

/// Shape of the logits, and which columns of the vocabulary they hold.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CrossEntropyDims {
    /// N: positions that are scored.
    pub rows: usize,
    /// V of the whole vocabulary, which the targets lie below.
    pub vocab: usize,
    /// Token id of the first column; 0 unless the vocabulary is split.
    pub first_id: usize,
    /// Columns of the logits: V, or a shard of it, possibly 0.
    pub columns: usize,
    /// Divides the logits before log-probability and entropy alike; above 0.
    pub temperature: f32,
}

impl CrossEntropyDims {
    /// Logits over the whole vocabulary.
    pub fn whole(rows: usize, vocab: usize, temperature: f32) -> Self {
        Self {
            rows,
            vocab,
            first_id: 0,
            columns: vocab,
            temperature,
        }
    }

    /// The column of a target, if it is one of these.
    fn column(&self, target: u32) -> Option<usize> {
        let column = (target as usize).checked_sub(self.first_id)?;
        (column < self.columns).then_some(column)
    }
}

/// Fills log_prob, lse, and entropy if given, from logits over the whole vocabulary: the same bits as
/// [`forward_partial`] and [`combine`] of one shard.
///
/// # Panics
/// If a target is not below V, the temperature is not positive and finite, or columns are missing.
#[track_caller]
pub fn forward<'on>(
    on: impl Into<On<'on>>,
    dims: &CrossEntropyDims,
    logits: &[f32],              // [N, V]
    targets: &[u32],             // [N]
    log_prob: &mut [f32],        // [N]
    entropy: Option<&mut [f32]>, // [N]
    lse: &mut [f64],             // [N]
) {
    check_inputs(dims, logits, targets);
    assert!(
        dims.columns == dims.vocab && dims.first_id == 0,
        "cross_entropy: {dims:?} is a shard: use forward_partial and combine"
    );
    check_outputs(dims.rows, log_prob, entropy.as_deref(), lse);
    match on.into() {
        On::Cpu(cpu) => cpu::forward(cpu, dims, logits, targets, log_prob, entropy, lse),
        On::Device(unified) => unified.run(|call| {
            let (logits, targets) = (call.input(logits)?, call.input(targets)?);
            let entropy = entropy.map(|entropy| call.output(entropy)).transpose()?;
            let (log_prob, lse) = (call.output(log_prob)?, call.output(lse)?);
            device::forward(call.device(), dims, logits, targets, log_prob, entropy, lse)
        }),
    }
}

/// Numbers a row in [`forward_partial`]'s output.
pub const PARTIALS: usize = 4;

/// Fills the partial results of this shard's columns, with z = x / temperature and m the largest z of a row:
/// m, sum e^(z - m), sum (z - m) e^(z - m) (0 unless `entropy`), and the target's z.
///
/// m is negative infinity and the sums are 0 where no column can occur; the target's z is negative infinity
/// where another shard has its column.
///
/// # Panics
/// If a target is not below V, or the temperature is not positive and finite.
#[track_caller]
pub fn forward_partial<'on>(
    on: impl Into<On<'on>>,
    dims: &CrossEntropyDims,
    logits: &[f32],  // [N, columns]
    targets: &[u32], // [N]
    entropy: bool,
    partials: &mut [f64], // [N, 4]
) {
    check_inputs(dims, logits, targets);
    check::len("partials", partials, dims.rows * PARTIALS);
    match on.into() {
        On::Cpu(cpu) => cpu::forward_partial(cpu, dims, logits, targets, entropy, partials),
        On::Device(unified) => unified.run(|call| {
            let (logits, targets) = (call.input(logits)?, call.input(targets)?);
            let partials = call.output(partials)?;
            device::forward_partial(call.device(), dims, logits, targets, entropy, partials)
        }),
    }
}

/// Fills log_prob, lse, and entropy if given, from the partial results of all R shards.
#[track_caller]
pub fn combine(
    rows: usize,
    partials: &[f64],            // [R, N, 4]
    log_prob: &mut [f32],        // [N]
    entropy: Option<&mut [f32]>, // [N]
    lse: &mut [f64],             // [N]
) {
    check_outputs(rows, log_prob, entropy.as_deref(), lse);
    let shard = rows * PARTIALS;
    assert!(
        partials.len().is_multiple_of(shard.max(1)),
        "partials has {} elements, which are not whole shards of {rows} rows",
        partials.len()
    );
    cpu::combine(rows, partials, log_prob, entropy, lse);
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

impl<'a> Derivatives<'a> {
    fn on(&self, call: &mut Call<'_, 'a>) -> Result<device::Derivatives<'a>, CudaError> {
        let entropy = match self.entropy {
            Some((entropy, d_entropy)) => Some((call.input(entropy)?, call.input(d_entropy)?)),
            None => None,
        };
        Ok(device::Derivatives {
            lse: call.input(self.lse)?,
            d_log_prob: call.input(self.d_log_prob)?,
            entropy,
        })
    }
}

/// Overwrites dlogits with the derivative of the loss by the logits, whole or a shard.
///
/// A row whose derivatives are both zero gets zeros, whatever its logits hold.
///
/// # Panics
/// As [`forward`].
#[track_caller]
pub fn backward<'on>(
    on: impl Into<On<'on>>,
    dims: &CrossEntropyDims,
    logits: &[f32],  // [N, columns]
    targets: &[u32], // [N]
    derivatives: &Derivatives<'_>,
    dlogits: &mut [f32], // [N, columns]
) {
    check_inputs(dims, logits, targets);
    check_derivatives(dims.rows, derivatives);
    check::len("dlogits", dlogits, logits.len());
    match on.into() {
        On::Cpu(cpu) => cpu::backward(cpu, dims, logits, targets, derivatives, dlogits),
        On::Device(unified) => unified.run(|call| {
            let (logits, targets) = (call.input(logits)?, call.input(targets)?);
            let (derivatives, dlogits) = (derivatives.on(call)?, call.output(dlogits)?);
            device::backward(call.device(), dims, logits, targets, &derivatives, dlogits)
        }),
    }
}

/// As [`backward`], turning the logits themselves into dlogits.
#[track_caller]
pub fn backward_in_place<'on>(
    on: impl Into<On<'on>>,
    dims: &CrossEntropyDims,
    logits: &mut [f32], // [N, columns]
    targets: &[u32],    // [N]
    derivatives: &Derivatives<'_>,
) {
    check_inputs(dims, logits, targets);
    check_derivatives(dims.rows, derivatives);
    match on.into() {
        On::Cpu(cpu) => cpu::backward_in_place(cpu, dims, logits, targets, derivatives),
        On::Device(unified) => unified.run(|call| {
            let (logits, targets) = (call.output(logits)?, call.input(targets)?);
            let derivatives = derivatives.on(call)?;
            device::backward_in_place(call.device(), dims, logits, targets, &derivatives)
        }),
    }
}

#[track_caller]
fn check_outputs(rows: usize, log_prob: &[f32], entropy: Option<&[f32]>, lse: &[f64]) {
    check::len("log_prob", log_prob, rows);
    check::len("lse", lse, rows);
    if let Some(entropy) = entropy {
        check::len("entropy", entropy, rows);
    }
}

#[track_caller]
fn check_derivatives(rows: usize, derivatives: &Derivatives<'_>) {
    check::len("lse", derivatives.lse, rows);
    check::len("d_log_prob", derivatives.d_log_prob, rows);
    if let Some((entropy, d_entropy)) = derivatives.entropy {
        check::len("entropy", entropy, rows);
        check::len("d_entropy", d_entropy, rows);
    }
}

#[track_caller]
fn check_inputs(dims: &CrossEntropyDims, logits: &[f32], targets: &[u32]) {
    assert!(
        dims.temperature > 0.0 && dims.temperature.is_finite(),
        "cross_entropy: temperature {} is not positive and finite",
        dims.temperature
    );
    check::len("logits", logits, dims.rows * dims.columns);
    check::len("targets", targets, dims.rows);
    if let Some(row) = targets.iter().position(|&t| t as usize >= dims.vocab) {
        panic!(
            "cross_entropy: target {} of row {row} is not below the vocabulary of {}",
            targets[row], dims.vocab
        );
    }
}

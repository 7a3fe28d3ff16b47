//! Permutation of tokens for a mixture of experts: rows sorted by expert on the way in, their weighted sum on
//! the way out.
//!
//! A token t goes to the experts of its slots (t, j), j below k. [`sort`] puts all slots in the order of their
//! experts, within an expert in the order of the tokens; row r of a permuted tensor is of slot `slots[r]`, and
//! slot s has row `rows[s]`. Every slot has a row: nothing is dropped, and experts may have any number.
//!
//! | function | computes |
//! |---|---|
//! | [`permute`] | y of row r = x of its token |
//! | [`permute_backward`] | dx of t = sum over j of dy of the row of (t, j) |
//! | [`unpermute`] | out of t = sum over j of `weights[t, j]` y of the row of (t, j) |
//! | [`unpermute_backward`] | dy of row r = its weight times dout of its token; d_weights = dout . y |
//!
//! x, out `[T, D]`; y `[T k, D]`; weights `[T, k]`. f32; sums over j in f32 in the order of j, dot products in
//! f64. A second permutation, of rows that other ranks sent, is one with k = 1: [`permute`] sorts them,
//! [`permute_backward`] puts them back. Threads split tokens or rows, so results do not depend on their number. No scratch.

mod cpu;
pub mod reference;
#[cfg(test)]
mod tests;

use crate::cuda::ops::permute as device;
use crate::cuda::{Call, CudaError};
use crate::{On, check};

/// Shape of the permutation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PermuteDims {
    /// T.
    pub tokens: usize,
    /// k: rows of a token.
    pub top_k: usize,
    /// D.
    pub width: usize,
}

/// The order of rows that [`sort`] made.
#[derive(Debug, Clone, Copy)]
pub struct Order<'a> {
    /// Slot of each row `[T k]`.
    pub slots: &'a [u32],
    /// Row of each slot `[T k]`.
    pub rows: &'a [u32],
}

/// Sorts the slots by expert: fills offsets (expert e has rows `offsets[e]`..`offsets[e + 1]`), slots and rows.
///
/// # Panics
/// If an expert is not below X.
#[track_caller]
pub fn sort(
    experts: &[u32],       // [T, k]
    offsets: &mut [usize], // [X + 1]
    slots: &mut [u32],     // [T k]
    rows: &mut [u32],      // [T k]
) {
    check::len("slots", slots, experts.len());
    check::len("rows", rows, experts.len());
    let num_experts = offsets.len().saturating_sub(1);
    if let Some(slot) = experts.iter().position(|&e| e as usize >= num_experts) {
        panic!(
            "permute: expert {} of slot {slot} is not below {num_experts}",
            experts[slot]
        );
    }
    cpu::sort(experts, offsets, slots, rows);
}

/// y of every row from x of its token.
#[track_caller]
pub fn permute<'on>(
    on: impl Into<On<'on>>,
    dims: &PermuteDims,
    order: &Order<'_>,
    x: &[f32],     // [T, D]
    y: &mut [f32], // [T k, D]
) {
    dims.check(order, ("x", x), ("y", y));
    match on.into() {
        On::Cpu(cpu) => cpu::permute(cpu, dims, order, x, y),
        On::Device(unified) => unified.run(|call| {
            let (order, x, y) = (order.on(call)?, call.input(x)?, call.output(y)?);
            device::permute(call.device(), dims, &order, x, y)
        }),
    }
}

/// dx of every token from dy of its rows, added to dx if `accumulate`.
#[track_caller]
pub fn permute_backward<'on>(
    on: impl Into<On<'on>>,
    dims: &PermuteDims,
    order: &Order<'_>,
    dy: &[f32], // [T k, D]
    accumulate: bool,
    dx: &mut [f32], // [T, D]
) {
    dims.check(order, ("dx", dx), ("dy", dy));
    match on.into() {
        On::Cpu(cpu) => cpu::gather_sum(cpu, dims, order, dy, None, accumulate, dx),
        On::Device(unified) => unified.run(|call| {
            let (order, dy, dx) = (order.on(call)?, call.input(dy)?, call.output(dx)?);
            device::permute_backward(call.device(), dims, &order, dy, accumulate, dx)
        }),
    }
}

/// The weighted sum of every token's rows, added to out if `accumulate` (the residual stream).
#[track_caller]
pub fn unpermute<'on>(
    on: impl Into<On<'on>>,
    dims: &PermuteDims,
    order: &Order<'_>,
    y: &[f32],       // [T k, D]
    weights: &[f32], // [T, k]
    accumulate: bool,
    out: &mut [f32], // [T, D]
) {
    dims.check(order, ("out", out), ("y", y));
    check::len("weights", weights, dims.rows());
    match on.into() {
        On::Cpu(cpu) => cpu::gather_sum(cpu, dims, order, y, Some(weights), accumulate, out),
        On::Device(unified) => unified.run(|call| {
            let (order, y, out) = (order.on(call)?, call.input(y)?, call.output(out)?);
            let weights = call.input(weights)?;
            device::unpermute(call.device(), dims, &order, y, weights, accumulate, out)
        }),
    }
}

/// Overwrites dy and d_weights.
#[track_caller]
#[allow(clippy::too_many_arguments)] // the operands of one fused op
pub fn unpermute_backward<'on>(
    on: impl Into<On<'on>>,
    dims: &PermuteDims,
    order: &Order<'_>,
    dout: &[f32],          // [T, D]
    y: &[f32],             // [T k, D]
    weights: &[f32],       // [T, k]
    dy: &mut [f32],        // [T k, D]
    d_weights: &mut [f32], // [T, k]
) {
    dims.check(order, ("dout", dout), ("y", y));
    check::len("dy", dy, y.len());
    check::len("weights", weights, dims.rows());
    check::len("d_weights", d_weights, dims.rows());
    match on.into() {
        On::Cpu(cpu) => {
            cpu::unpermute_backward(cpu, dims, order, (dout, y, weights), (dy, d_weights));
        }
        On::Device(unified) => unified.run(|call| {
            let (order, dout, y) = (order.on(call)?, call.input(dout)?, call.input(y)?);
            let weights = call.input(weights)?;
            let (dy, d_weights) = (call.output(dy)?, call.output(d_weights)?);
            device::unpermute_backward(call.device(), dims, &order, dout, y, weights, dy, d_weights)
        }),
    }
}

impl<'a> Order<'a> {
    fn on(&self, call: &mut Call<'_, 'a>) -> Result<device::Order<'a>, CudaError> {
        Ok(device::Order {
            slots: call.input(self.slots)?,
            rows: call.input(self.rows)?,
        })
    }
}

impl PermuteDims {
    /// T k.
    pub fn rows(&self) -> usize {
        self.tokens * self.top_k
    }

    #[track_caller]
    fn check(&self, order: &Order<'_>, by_token: (&str, &[f32]), by_row: (&str, &[f32])) {
        check::len(by_token.0, by_token.1, self.tokens * self.width);
        check::len(by_row.0, by_row.1, self.rows() * self.width);
        check::len("slots", order.slots, self.rows());
        check::len("rows", order.rows, self.rows());
        for (slot, &row) in order.rows.iter().enumerate() {
            assert!(
                order.slots.get(row as usize) == Some(&(slot as u32)),
                "permute: slot {slot} has row {row}, which is not of that slot"
            );
        }
    }
}

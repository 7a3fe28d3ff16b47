//! Causal attention of queries over keys, with grouped heads and an optional sliding window; whole sequences,
//! or the parts of them that meet in a step of ring attention (context parallelism).
//!
//! A [`Span`] says which rows of q meet which rows of k and v, and how far apart their positions lie. Query
//! head h reads key/value head h / (H / K). A query at position i sees the keys at positions j <= i of its
//! span, and with a window w only i - j < w:
//!
//! ```text
//! s_ij = scale q_i . k_j      lse_i = log sum_j e^(s_ij)      p_ij = e^(s_ij - lse_i)
//! out_i = sum_j p_ij v_j
//! ```
//!
//! q, out `[Tq, H E]`; k, v `[Tk, K E]`, each possibly a band of a wider buffer; lse `[Tq, H]`. All f32.
//! The scores never exist as a whole (online softmax: Milakov and Gimelshein 2018; blocks: Dao 2023); blocks
//! beyond the diagonal or out of the window are skipped. The backward pass computes the probabilities again
//! from lse:
//!
//! ```text
//! delta_i = dout_i . out_i         ds_ij = scale p_ij (dout_i . v_j - delta_i)
//! dq_i = sum_j ds_ij k_j           dk_j = sum_i ds_ij q_i           dv_j = sum_i p_ij dout_i
//! ```
//!
//! Attention over keys that arrive piece by piece: [`forward`] with `merge` carries (out, lse) from call to
//! call, [`backward`] with `accumulate` adds up the gradients of all pieces from the final out and lse.
//! A query that has seen nothing has out 0 and lse negative infinity, and gets and gives gradient 0.
//!
//! Threads share out (group of spans, key/value head) pairs, where spans with a row in common are of one
//! group, so results do not depend on their number.
//! Scratch: [`AttentionDims::forward_scratch_len`] and [`AttentionDims::backward_scratch_len`], linear in the
//! longest span, a share for each thread; contents are irrelevant before and after.

mod backward;
mod block;
mod forward;
pub mod reference;
#[cfg(test)]
mod ring_tests;
mod span;
#[cfg(test)]
mod tests;

pub use span::Span;

use crate::cuda::ops::attention as device;
use crate::cuda::{Call, CudaError};
use crate::{On, Rows, RowsMut, check};
use span::{Piece, check_disjoint};

/// Shape and masking of the attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionDims<'a> {
    /// Which queries meet which keys; [`Span::packed`] for whole sequences.
    pub spans: &'a [Span],
    /// H.
    pub heads: usize,
    /// K, a divisor of H.
    pub kv_heads: usize,
    /// E.
    pub head_dim: usize,
    /// Factor of the scores, usually 1 / sqrt(E).
    pub scale: f32,
    /// Number of keys a query sees, itself included; `None` for all before it.
    pub window: Option<usize>,
}

impl AttentionDims<'_> {
    /// Elements of scratch for [`forward`]; a device brings its own.
    pub fn forward_scratch_len<'on>(&self, on: impl Into<On<'on>>) -> usize {
        self.workers(on.into()) * forward::scratch_len(self)
    }

    /// Elements of scratch for [`backward`]; a device brings its own.
    pub fn backward_scratch_len<'on>(&self, on: impl Into<On<'on>>) -> usize {
        self.workers(on.into()) * backward::scratch_len(self)
    }

    /// FLOPs of the forward pass: 4 E for every pair of a query head and a key it sees.
    /// The backward pass takes 2.5 times as many, counting the scores computed again.
    pub fn forward_flops(&self) -> f64 {
        let pairs: f64 = self.pieces().map(|piece| piece.pairs(self.window)).sum();
        4.0 * self.head_dim as f64 * self.heads as f64 * pairs
    }

    fn pieces(&self) -> impl Iterator<Item = Piece> {
        self.spans.iter().filter_map(|span| span.seen(self.window))
    }

    fn workers(&self, on: On<'_>) -> usize {
        match on {
            On::Cpu(cpu) => cpu.threads().min(self.spans.len() * self.kv_heads).max(1),
            On::Device(_) => 0,
        }
    }

    fn most_keys(&self) -> usize {
        self.pieces()
            .map(|piece| piece.keys.len())
            .max()
            .unwrap_or(0)
    }

    #[track_caller]
    fn check(&self) {
        assert!(
            self.kv_heads > 0 && self.heads.is_multiple_of(self.kv_heads),
            "attention: {} query heads over {} key/value heads",
            self.heads,
            self.kv_heads
        );
        assert!(self.head_dim > 0, "attention: head dim is 0");
        assert!(
            self.window != Some(0),
            "attention: a window of 0 keys leaves nothing to see"
        );
    }

    /// Numbers of queries and of keys.
    #[track_caller]
    fn check_inputs(&self, inputs: &Inputs<'_>) -> (usize, usize) {
        self.check();
        let (queries, keys) = (inputs.q.rows(), inputs.k.rows());
        self.check_rows("q", (queries, inputs.q.width()), (queries, self.heads));
        self.check_rows("k", (keys, inputs.k.width()), (keys, self.kv_heads));
        let v = (inputs.v.rows(), inputs.v.width());
        self.check_rows("v", v, (keys, self.kv_heads));
        for span in self.spans {
            let (q, k) = (&span.queries, &span.keys);
            assert!(
                q.start <= q.end && q.end <= queries && k.start <= k.end && k.end <= keys,
                "attention: {span:?} beyond {queries} queries and {keys} keys"
            );
        }
        (queries, keys)
    }

    #[track_caller]
    fn check_rows(&self, name: &str, found: (usize, usize), (rows, heads): (usize, usize)) {
        let expected = (rows, heads * self.head_dim);
        assert!(
            found == expected,
            "attention: {name} is {found:?}, the dimensions say {expected:?}"
        );
    }
}

/// Queries, keys and values, after the rotary embedding.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// `[Tq, H E]`.
    pub q: Rows<'a>,
    /// `[Tk, K E]`.
    pub k: Rows<'a>,
    /// `[Tk, K E]`.
    pub v: Rows<'a>,
}

impl<'a> Inputs<'a> {
    fn on(&self, call: &mut Call<'_, 'a>) -> Result<device::Inputs<'a>, CudaError> {
        Ok(device::Inputs {
            q: call.rows(self.q)?,
            k: call.rows(self.k)?,
            v: call.rows(self.v)?,
        })
    }
}

/// What the forward pass left, and the gradient that arrives.
#[derive(Debug, Clone, Copy)]
pub struct Saved<'a> {
    /// `[Tq, H E]`.
    pub out: Rows<'a>,
    /// `[Tq, H]`.
    pub lse: &'a [f32],
    /// `[Tq, H E]`.
    pub dout: Rows<'a>,
}

/// Where the gradients go. Bands of one buffer by [`RowsMut::split_columns`].
#[derive(Debug)]
pub struct Gradients<'a> {
    /// `[Tq, H E]`.
    pub dq: RowsMut<'a>,
    /// `[Tk, K E]`.
    pub dk: RowsMut<'a>,
    /// `[Tk, K E]`.
    pub dv: RowsMut<'a>,
}

/// Attends to the keys of all spans, from nothing or, with `merge`, from what earlier calls left.
///
/// Without `merge` all of out and lse are overwritten. With it they hold the result over the keys seen so far
/// (0 and negative infinity at the start), each span is merged into it in turn, and a query that sees nothing
/// in any span is left alone.
///
/// # Panics
/// Without `merge`, if two spans have a query in common.
#[track_caller]
pub fn forward<'on>(
    on: impl Into<On<'on>>,
    dims: &AttentionDims<'_>,
    inputs: &Inputs<'_>,
    merge: bool,
    out: RowsMut<'_>, // [Tq, H E]
    lse: &mut [f32],  // [Tq, H]
    scratch: &mut [f32],
) {
    let on = on.into();
    let (queries, keys) = dims.check_inputs(inputs);
    dims.check_rows("out", (out.rows(), out.width()), (queries, dims.heads));
    check::len("lse", lse, queries * dims.heads);
    check::at_least("scratch", scratch, dims.forward_scratch_len(on));
    if !merge {
        check_disjoint("queries", dims.spans.iter().map(|span| &span.queries));
    }
    match on {
        On::Cpu(cpu) => forward::run(cpu, dims, inputs, merge, out, lse, scratch),
        On::Device(unified) => unified.run(|call| {
            let plan = device::Plan::new(call.device(), dims, queries, keys)?;
            let (inputs, out, lse) = (inputs.on(call)?, call.rows_mut(out)?, call.output(lse)?);
            device::forward(call.device(), &plan, &inputs, merge, out, lse)
        }),
    }
}

/// Overwrites dq, dk and dv, or adds to them with `accumulate`: what flows through the pairs of these spans.
///
/// `saved` is of all keys, also those of spans that are not in `dims`.
///
/// # Panics
/// Without `accumulate`, if two spans have a query or a key in common.
#[track_caller]
pub fn backward<'on>(
    on: impl Into<On<'on>>,
    dims: &AttentionDims<'_>,
    inputs: &Inputs<'_>,
    saved: &Saved<'_>,
    accumulate: bool,
    gradients: Gradients<'_>,
    scratch: &mut [f32],
) {
    let on = on.into();
    let (queries, keys) = dims.check_inputs(inputs);
    let Gradients { dq, dk, dv } = &gradients;
    for (name, found, expected) in [
        (
            "out",
            (saved.out.rows(), saved.out.width()),
            (queries, dims.heads),
        ),
        (
            "dout",
            (saved.dout.rows(), saved.dout.width()),
            (queries, dims.heads),
        ),
        ("dq", (dq.rows(), dq.width()), (queries, dims.heads)),
        ("dk", (dk.rows(), dk.width()), (keys, dims.kv_heads)),
        ("dv", (dv.rows(), dv.width()), (keys, dims.kv_heads)),
    ] {
        dims.check_rows(name, found, expected);
    }
    check::len("lse", saved.lse, queries * dims.heads);
    check::at_least("scratch", scratch, dims.backward_scratch_len(on));
    if !accumulate {
        check_disjoint("queries", dims.spans.iter().map(|span| &span.queries));
        check_disjoint("keys", dims.spans.iter().map(|span| &span.keys));
    }
    match on {
        On::Cpu(cpu) => backward::run(cpu, dims, inputs, saved, accumulate, gradients, scratch),
        On::Device(unified) => unified.run(|call| {
            let plan = device::Plan::new(call.device(), dims, queries, keys)?;
            let mut scratch = call.device().uninit(plan.backward_scratch_len())?;
            let inputs = inputs.on(call)?;
            let saved = device::Saved {
                out: call.rows(saved.out)?,
                lse: call.input(saved.lse)?,
                dout: call.rows(saved.dout)?,
            };
            let gradients = device::Gradients {
                dq: call.rows_mut(gradients.dq)?,
                dk: call.rows_mut(gradients.dk)?,
                dv: call.rows_mut(gradients.dv)?,
            };
            let (device, scratch) = (call.device(), scratch.view_mut());
            device::backward(
                device, &plan, &inputs, &saved, accumulate, gradients, scratch,
            )
        }),
    }
}

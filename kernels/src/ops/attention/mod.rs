//! Causal attention over packed sequences, with grouped queries and an optional sliding window.
//!
//! Sequence b holds the tokens `cu_seqlens[b]`..`cu_seqlens[b + 1]`. Query head h reads key/value head
//! h / (H / K). Query token i sees the keys j <= i of its sequence, and with a window w only i - j < w:
//!
//! ```text
//! s_ij = scale q_i . k_j      lse_i = log sum_j e^(s_ij)      p_ij = e^(s_ij - lse_i)
//! out_i = sum_j p_ij v_j
//! ```
//!
//! q, out `[T, H E]`; k, v `[T, K E]`, each possibly a band of a wider buffer; lse `[T, H]`. All f32.
//! The scores never exist as a whole (online softmax: Milakov and Gimelshein 2018; blocks: Dao 2023); blocks
//! beyond the diagonal or out of the window are skipped. The backward pass computes the probabilities again
//! from lse:
//!
//! ```text
//! delta_i = dout_i . out_i         ds_ij = scale p_ij (dout_i . v_j - delta_i)
//! dq_i = sum_j ds_ij k_j           dk_j = sum_i ds_ij q_i           dv_j = sum_i p_ij dout_i
//! ```
//!
//! Threads share out (sequence, key/value head) pairs, so results do not depend on their number.
//! Scratch: [`AttentionDims::forward_scratch_len`] and [`AttentionDims::backward_scratch_len`], linear in the
//! longest sequence, a share for each thread; contents are irrelevant before and after.

mod backward;
mod block;
mod forward;
pub mod reference;
#[cfg(test)]
mod tests;

use crate::{Cpu, Rows, RowsMut, check};

/// Shape and masking of the attention.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionDims<'a> {
    /// Starts of the sequences and the end of the last `[B + 1]`: from 0 to T, never falling.
    pub cu_seqlens: &'a [usize],
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
    /// T.
    pub fn tokens(&self) -> usize {
        self.cu_seqlens.last().copied().unwrap_or(0)
    }

    /// Elements of scratch for [`forward`].
    pub fn forward_scratch_len(&self, cpu: Cpu) -> usize {
        self.workers(cpu) * forward::scratch_len(self)
    }

    /// Elements of scratch for [`backward`].
    pub fn backward_scratch_len(&self, cpu: Cpu) -> usize {
        self.workers(cpu) * backward::scratch_len(self)
    }

    /// FLOPs of the forward pass: 4 E for every pair of a query head and a key it sees.
    /// The backward pass takes 2.5 times as many, counting the scores computed again.
    pub fn forward_flops(&self) -> f64 {
        let pairs: f64 = self
            .cu_seqlens
            .windows(2)
            .map(|ends| {
                let len = (ends[1] - ends[0]) as f64;
                let full = self.window.map_or(len, |window| (window as f64).min(len));
                full * (full + 1.0) / 2.0 + (len - full) * full
            })
            .sum();
        4.0 * self.head_dim as f64 * self.heads as f64 * pairs
    }

    fn tasks(&self) -> usize {
        self.cu_seqlens.len().saturating_sub(1) * self.kv_heads
    }

    fn workers(&self, cpu: Cpu) -> usize {
        cpu.threads().min(self.tasks()).max(1)
    }

    fn longest(&self) -> usize {
        self.cu_seqlens
            .windows(2)
            .map(|ends| ends[1] - ends[0])
            .max()
            .unwrap_or(0)
    }

    #[track_caller]
    fn check(&self) {
        let starts = self.cu_seqlens;
        assert!(
            starts.first() == Some(&0) && starts.is_sorted(),
            "attention: cu_seqlens must rise from 0, found {starts:?}"
        );
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

    #[track_caller]
    fn check_rows(&self, name: &str, found: (usize, usize), heads: usize) {
        let expected = (self.tokens(), heads * self.head_dim);
        assert!(
            found == expected,
            "attention: {name} is {found:?}, the dimensions say {expected:?}"
        );
    }

    #[track_caller]
    fn check_inputs(&self, inputs: &Inputs<'_>) {
        self.check();
        self.check_rows("q", (inputs.q.rows(), inputs.q.width()), self.heads);
        self.check_rows("k", (inputs.k.rows(), inputs.k.width()), self.kv_heads);
        self.check_rows("v", (inputs.v.rows(), inputs.v.width()), self.kv_heads);
    }
}

/// Queries, keys and values, after the rotary embedding.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// `[T, H E]`.
    pub q: Rows<'a>,
    /// `[T, K E]`.
    pub k: Rows<'a>,
    /// `[T, K E]`.
    pub v: Rows<'a>,
}

/// What the forward pass left, and the gradient that arrives.
#[derive(Debug, Clone, Copy)]
pub struct Saved<'a> {
    /// `[T, H E]`.
    pub out: Rows<'a>,
    /// `[T, H]`.
    pub lse: &'a [f32],
    /// `[T, H E]`.
    pub dout: Rows<'a>,
}

/// Where the gradients go; all overwritten. Bands of one buffer by [`RowsMut::split_columns`].
#[derive(Debug)]
pub struct Gradients<'a> {
    /// `[T, H E]`.
    pub dq: RowsMut<'a>,
    /// `[T, K E]`.
    pub dk: RowsMut<'a>,
    /// `[T, K E]`.
    pub dv: RowsMut<'a>,
}

/// Fills out and lse.
#[track_caller]
pub fn forward(
    cpu: Cpu,
    dims: &AttentionDims<'_>,
    inputs: &Inputs<'_>,
    out: RowsMut<'_>, // [T, H E]
    lse: &mut [f32],  // [T, H]
    scratch: &mut [f32],
) {
    dims.check_inputs(inputs);
    dims.check_rows("out", (out.rows(), out.width()), dims.heads);
    check::len("lse", lse, dims.tokens() * dims.heads);
    check::at_least("scratch", scratch, dims.forward_scratch_len(cpu));
    forward::run(cpu, dims, inputs, &out, lse, scratch);
}

/// Fills dq, dk and dv.
#[track_caller]
pub fn backward(
    cpu: Cpu,
    dims: &AttentionDims<'_>,
    inputs: &Inputs<'_>,
    saved: &Saved<'_>,
    gradients: Gradients<'_>,
    scratch: &mut [f32],
) {
    dims.check_inputs(inputs);
    dims.check_rows("out", (saved.out.rows(), saved.out.width()), dims.heads);
    dims.check_rows("dout", (saved.dout.rows(), saved.dout.width()), dims.heads);
    dims.check_rows(
        "dq",
        (gradients.dq.rows(), gradients.dq.width()),
        dims.heads,
    );
    dims.check_rows(
        "dk",
        (gradients.dk.rows(), gradients.dk.width()),
        dims.kv_heads,
    );
    dims.check_rows(
        "dv",
        (gradients.dv.rows(), gradients.dv.width()),
        dims.kv_heads,
    );
    check::len("lse", saved.lse, dims.tokens() * dims.heads);
    check::at_least("scratch", scratch, dims.backward_scratch_len(cpu));
    backward::run(cpu, dims, inputs, saved, &gradients, scratch);
}

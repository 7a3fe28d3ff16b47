//! RMSNorm of every head of q and k (Qwen3), with one weight [E] for all heads of each.

use drivetrain_kernels::{
    Rows,
    ops::rms_norm::{self, RmsNormDims},
};

use super::{
    Context,
    attention::{Heads, bands, pair},
};
use crate::{
    weights::{Buffers, Sums, TensorRef},
    workspace::Buffer,
};

/// Weights [E] of the norms of q and k.
#[derive(Debug, Clone)]
pub(super) struct HeadNorms {
    pub(super) q: TensorRef,
    pub(super) k: TensorRef,
    pub(super) eps: f64,
}

/// What they make, and what backward needs beside their input.
#[derive(Debug)]
pub(super) struct SavedHeadNorms<A = Buffer> {
    pub(super) qk: A,  // [T, (H + K) E]
    q_inv_rms: Buffer, // [T, H]
    k_inv_rms: Buffer, // [T, K]
}

impl<A> SavedHeadNorms<A> {
    /// With q and k held otherwise.
    pub(super) fn map<B>(self, hold: impl FnOnce(A) -> B) -> SavedHeadNorms<B> {
        SavedHeadNorms {
            qk: hold(self.qk),
            q_inv_rms: self.q_inv_rms,
            k_inv_rms: self.k_inv_rms,
        }
    }
}

impl HeadNorms {
    /// q and k, normalised a head.
    pub(super) fn forward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        h: Heads,
        qkv: &[f32], // [T, (H + 2K) E]
    ) -> SavedHeadNorms {
        let t = cx.packed.num_tokens();
        let mut saved = SavedHeadNorms {
            qk: cx.workspace.take(t * (h.q() + h.kv())),
            q_inv_rms: cx.workspace.take(t * h.heads),
            k_inv_rms: cx.workspace.take(t * h.kv_heads),
        };
        let [q_columns, k_columns, _] = h.columns();
        let raw = Rows::contiguous(qkv, h.qkv());
        let [q, k] = pair(&mut saved.qk, h);
        for (heads, weight, columns, y, inv_rms) in [
            (h.heads, &self.q, q_columns, q, &mut saved.q_inv_rms),
            (h.kv_heads, &self.k, k_columns, k, &mut saved.k_inv_rms),
        ] {
            let dims = RmsNormDims::per_head(t, heads, h.head_dim, self.eps);
            let weight = params.get(weight);
            rms_norm::forward(cx.cpu, &dims, raw.columns(columns), weight, y, inv_rms);
        }
        saved
    }

    #[allow(clippy::too_many_arguments)] // the operands of one op
    pub(super) fn backward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        grads: &mut Sums,
        h: Heads,
        saved: &SavedHeadNorms,
        qkv: &[f32],      // [T, (H + 2K) E]
        dqk: &[f32],      // [T, (H + K) E]
        dqkv: &mut [f32], // [T, (H + 2K) E]; the band of v is left alone
    ) {
        let t = cx.packed.num_tokens();
        let [q_columns, k_columns, _] = h.columns();
        let [dq, dk, _] = bands(dqkv, h);
        let raw = Rows::contiguous(qkv, h.qkv());
        let dqk = Rows::contiguous(dqk, h.q() + h.kv());
        for (heads, weight, columns, inv_rms, dx) in [
            (h.heads, &self.q, q_columns, &saved.q_inv_rms, dq),
            (h.kv_heads, &self.k, k_columns, &saved.k_inv_rms, dk),
        ] {
            rms_norm::backward(
                cx.cpu,
                &RmsNormDims::per_head(t, heads, h.head_dim, self.eps),
                dqk.columns(columns.clone()),
                raw.columns(columns),
                params.get(weight),
                inv_rms,
                false,
                dx,
                cx.accumulate,
                grads.get_mut(weight),
            );
        }
    }
}

//! Grouped-query attention: fused q, k, v projection, optional norm a head (Qwen3), RoPE, causal attention
//! within each sequence, output projection.
//!
//! One weight [(H + 2K) E, D] makes qkv [T, (H + 2K) E], whose bands are q, k and v. RoPE turns q and k in
//! place, or, where they are normalised, in a buffer of their own.

use std::ops::Range;

use drivetrain_core::{Result, model::ModelSpec, plan::PlannedOp};
use drivetrain_kernels::{
    Rows, RowsMut,
    ops::{
        attention::{self, AttentionDims, Gradients, Inputs, Saved, Span},
        rms_norm::{self, RmsNormDims},
        rope::{self, RopeDims},
    },
};

use super::{Context, linear::Linear, planned};
use crate::{
    weights::{Buffers, LayoutBuilder, TensorRef},
    workspace::Buffer,
};

/// The projections and their heads.
#[derive(Debug, Clone)]
pub(super) struct Attention {
    pub(super) qkv: Linear,
    pub(super) out: Linear,
    pub(super) head_norms: Option<HeadNorms>,
    pub(super) heads: Heads,
    pub(super) window: Option<usize>,
}

/// H, K and E.
#[derive(Debug, Clone, Copy)]
pub(super) struct Heads {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
}

/// Weights [E] of the norms of q and k.
#[derive(Debug, Clone)]
pub(super) struct HeadNorms {
    pub(super) q: TensorRef,
    pub(super) k: TensorRef,
    pub(super) eps: f64,
}

/// What backward needs beside the input.
#[derive(Debug)]
pub(super) struct SavedAttention {
    qkv: Buffer, // [T, (H + 2K) E]; q and k are rotated unless they are in `normed`
    normed: Option<SavedHeadNorms>,
    out: Buffer, // [T, H E]
    lse: Buffer, // [T, H]
}

#[derive(Debug)]
struct SavedHeadNorms {
    qk: Buffer,        // [T, (H + K) E], normalised and rotated
    q_inv_rms: Buffer, // [T, H]
    k_inv_rms: Buffer, // [T, K]
}

impl Heads {
    fn q(self) -> usize {
        self.heads * self.head_dim
    }

    fn kv(self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Width of qkv.
    pub(super) fn qkv(self) -> usize {
        self.q() + 2 * self.kv()
    }

    fn columns(self) -> [Range<usize>; 3] {
        let (q, kv) = (self.q(), self.kv());
        [0..q, q..q + kv, q + kv..q + 2 * kv]
    }
}

impl Attention {
    /// Places the weights of layer `index`.
    ///
    /// # Errors
    /// `Defect` from the layout.
    pub(super) fn new(
        spec: &ModelSpec,
        index: usize,
        window: Option<usize>,
        layout: &mut LayoutBuilder,
    ) -> Result<Self> {
        let name = |part: &str| format!("model.layers.{index}.self_attn.{part}");
        let mut stack = |parts: &[&str]| {
            let names: Vec<_> = parts.iter().map(|p| name(p)).collect();
            layout.stack(&names.iter().map(String::as_str).collect::<Vec<_>>())
        };
        let heads = Heads {
            heads: spec.num_heads,
            kv_heads: spec.num_kv_heads,
            head_dim: spec.head_dim,
        };
        let weight = stack(&["q_proj.weight", "k_proj.weight", "v_proj.weight"])?;
        let bias = match spec.qkv_bias {
            true => Some(stack(&["q_proj.bias", "k_proj.bias", "v_proj.bias"])?),
            false => None,
        };
        let head_norms = match spec.qk_norm {
            true => Some(HeadNorms {
                q: stack(&["q_norm.weight"])?,
                k: stack(&["k_norm.weight"])?,
                eps: spec.rms_norm_eps,
            }),
            false => None,
        };
        let qkv = Linear {
            weight,
            bias,
            inputs: spec.hidden_size,
            outputs: heads.qkv(),
        };
        let out = Linear {
            weight: stack(&["o_proj.weight"])?,
            bias: None,
            inputs: heads.q(),
            outputs: spec.hidden_size,
        };
        Ok(Self {
            qkv,
            out,
            head_norms,
            heads,
            window,
        })
    }

    /// Adds its output to `residual`.
    pub(super) fn forward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        x: &[f32],            // [T, D]
        residual: &mut [f32], // [T, D]
    ) -> SavedAttention {
        let (t, h) = (cx.packed.num_tokens(), self.heads);
        let mut qkv = cx.workspace.take(t * h.qkv());
        self.qkv.forward(cx, params, x, &mut qkv);
        let normed = self
            .head_norms
            .as_ref()
            .map(|n| n.forward(cx, params, h, &qkv));
        match normed {
            Some(_) => {}
            None => {
                let bands = RowsMut::contiguous(&mut qkv, h.qkv());
                let [q, k] = bands.split_columns([h.q(), h.kv()]);
                rotate(cx, h, rope::forward, q, k);
            }
        }
        let spans = cx.packed.spans();
        let dims = self.dims(&spans);
        let mut saved = SavedAttention {
            qkv,
            normed,
            out: cx.workspace.take(t * h.q()),
            lse: cx.workspace.take(t * h.heads),
        };
        let mut scratch = cx.workspace.take(dims.forward_scratch_len(cx.cpu));
        attention::forward(
            cx.cpu,
            &dims,
            &inputs(h, &saved.qkv, saved.normed.as_ref()),
            false,
            RowsMut::contiguous(&mut saved.out, h.q()),
            &mut saved.lse,
            &mut scratch,
        );
        self.out.forward_add(cx, params, &saved.out, residual);
        saved
    }

    /// The gradient of x.
    pub(super) fn backward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        grads: &mut Buffers,
        saved: SavedAttention,
        dy: &[f32], // [T, D]
        x: &[f32],  // [T, D]
    ) -> Buffer {
        let (t, h) = (cx.packed.num_tokens(), self.heads);
        let mut dout = cx.workspace.take(t * h.q());
        self.out
            .backward(cx, params, grads, dy, &saved.out, &mut dout);
        let mut dqkv = cx.workspace.take(t * h.qkv());
        match (&self.head_norms, &saved.normed) {
            (Some(norms), Some(normed)) => {
                let mut dqk = cx.workspace.take(t * (h.q() + h.kv()));
                let [dq, dk] =
                    RowsMut::contiguous(&mut dqk, h.q() + h.kv()).split_columns([h.q(), h.kv()]);
                let [_, _, dv] = bands(&mut dqkv, h);
                self.core_backward(cx, &saved, &dout, Gradients { dq, dk, dv });
                let [dq, dk] =
                    RowsMut::contiguous(&mut dqk, h.q() + h.kv()).split_columns([h.q(), h.kv()]);
                rotate(cx, h, rope::backward, dq, dk);
                norms.backward(cx, params, grads, h, normed, &saved.qkv, &dqk, &mut dqkv);
            }
            _ => {
                let [dq, dk, dv] = bands(&mut dqkv, h);
                self.core_backward(cx, &saved, &dout, Gradients { dq, dk, dv });
                let [dq, dk, _] = bands(&mut dqkv, h);
                rotate(cx, h, rope::backward, dq, dk);
            }
        }
        drop((dout, saved));
        let mut dx = cx.workspace.take(t * self.qkv.inputs);
        self.qkv.backward(cx, params, grads, &dqkv, x, &mut dx);
        dx
    }

    fn core_backward(
        &self,
        cx: &Context<'_>,
        saved: &SavedAttention,
        dout: &[f32], // [T, H E]
        gradients: Gradients<'_>,
    ) {
        let spans = cx.packed.spans();
        let (dims, width) = (self.dims(&spans), self.heads.q());
        let mut scratch = cx.workspace.take(dims.backward_scratch_len(cx.cpu));
        attention::backward(
            cx.cpu,
            &dims,
            &inputs(self.heads, &saved.qkv, saved.normed.as_ref()),
            &Saved {
                out: Rows::contiguous(&saved.out, width),
                lse: &saved.lse,
                dout: Rows::contiguous(dout, width),
            },
            false,
            gradients,
            &mut scratch,
        );
    }

    fn dims<'a>(&self, spans: &'a [Span]) -> AttentionDims<'a> {
        AttentionDims {
            spans,
            heads: self.heads.heads,
            kv_heads: self.heads.kv_heads,
            head_dim: self.heads.head_dim,
            scale: (1.0 / (self.heads.head_dim as f64).sqrt()) as f32,
            window: self.window,
        }
    }

    /// Its operations over one sequence of `tokens` tokens.
    pub(super) fn plan(&self, module: &str, tokens: usize) -> Vec<PlannedOp> {
        let h = self.heads;
        let mut qkv = self.qkv.plan(format!("{module}.qkv_proj"), tokens);
        qkv.saved_bytes = (tokens * h.qkv() * size_of::<f32>()) as u64;
        let mut ops = vec![qkv];
        if self.head_norms.is_some() {
            let rows = tokens * (h.heads + h.kv_heads);
            let name = format!("{module}.qk_norm");
            ops.push(planned(
                "rms_norm",
                name,
                [rows, h.head_dim, 1],
                rows * (h.head_dim + 1),
            ));
        }
        let rotated = h.heads + h.kv_heads;
        ops.push(planned(
            "rope",
            format!("{module}.rope"),
            [tokens, rotated, h.head_dim],
            0,
        ));
        let kept = tokens * (h.q() + h.heads);
        ops.push(planned(
            "attention",
            format!("{module}.core"),
            [tokens, tokens, h.q()],
            kept,
        ));
        ops.push(self.out.plan(format!("{module}.o_proj"), tokens));
        ops
    }
}

impl HeadNorms {
    /// q and k, normalised a head and rotated.
    fn forward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        h: Heads,
        qkv: &[f32], // [T, (H + 2K) E]
    ) -> SavedHeadNorms {
        let t = cx.packed.num_tokens();
        let width = h.q() + h.kv();
        let mut saved = SavedHeadNorms {
            qk: cx.workspace.take(t * width),
            q_inv_rms: cx.workspace.take(t * h.heads),
            k_inv_rms: cx.workspace.take(t * h.kv_heads),
        };
        let [q_columns, k_columns, _] = h.columns();
        let raw = Rows::contiguous(qkv, h.qkv());
        let [mut q, mut k] =
            RowsMut::contiguous(&mut saved.qk, width).split_columns([h.q(), h.kv()]);
        for (heads, weight, columns, y, inv_rms) in [
            (
                h.heads,
                &self.q,
                q_columns,
                q.reborrow(),
                &mut saved.q_inv_rms,
            ),
            (
                h.kv_heads,
                &self.k,
                k_columns,
                k.reborrow(),
                &mut saved.k_inv_rms,
            ),
        ] {
            let dims = RmsNormDims::per_head(t, heads, h.head_dim, self.eps);
            let weight = params.get(weight);
            rms_norm::forward(cx.cpu, &dims, raw.columns(columns), weight, y, inv_rms);
        }
        rotate(cx, h, rope::forward, q, k);
        saved
    }

    #[allow(clippy::too_many_arguments)] // the operands of one op
    fn backward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        grads: &mut Buffers,
        h: Heads,
        saved: &SavedHeadNorms,
        qkv: &[f32],      // [T, (H + 2K) E]
        dqk: &[f32],      // [T, (H + K) E]
        dqkv: &mut [f32], // [T, (H + 2K) E]; the band of v is left alone
    ) {
        let t = cx.packed.num_tokens();
        let [q_columns, k_columns, _] = h.columns();
        let [dq, dk, _] = bands(dqkv, h);
        let (raw, dqk) = (
            Rows::contiguous(qkv, h.qkv()),
            Rows::contiguous(dqk, h.q() + h.kv()),
        );
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

type Rotation = fn(drivetrain_kernels::Cpu, &RopeDims, &[u32], &[f32], &[f32], RowsMut<'_>);

fn rotate(cx: &Context<'_>, h: Heads, rotation: Rotation, q: RowsMut<'_>, k: RowsMut<'_>) {
    for (heads, band) in [(h.heads, q), (h.kv_heads, k)] {
        let dims = RopeDims {
            tokens: cx.packed.num_tokens(),
            heads,
            head_dim: h.head_dim,
        };
        rotation(
            cx.cpu,
            &dims,
            &cx.packed.positions,
            &cx.rope.cos,
            &cx.rope.sin,
            band,
        );
    }
}

fn inputs<'a>(h: Heads, qkv: &'a [f32], normed: Option<&'a SavedHeadNorms>) -> Inputs<'a> {
    let [q, k, v] = h.columns();
    let all = Rows::contiguous(qkv, h.qkv());
    let qk = normed.map_or(all, |n| Rows::contiguous(&n.qk, h.q() + h.kv()));
    Inputs {
        q: qk.columns(q),
        k: qk.columns(k),
        v: all.columns(v),
    }
}

fn bands(qkv: &mut [f32], h: Heads) -> [RowsMut<'_>; 3] {
    RowsMut::contiguous(qkv, h.qkv()).split_columns([h.q(), h.kv(), h.kv()])
}

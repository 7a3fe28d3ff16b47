//! Grouped-query attention: fused q, k, v projection, optional norm a head (Qwen3), RoPE, causal attention
//! within each sequence, output projection.
//!
//! One column-parallel weight [(H + 2K) E, D] makes qkv [T, (H + 2K) E], whose bands are q, k and v; H and K are
//! this rank's heads. RoPE turns q and k in place, or, where they are normalised, in a buffer of their own.

use std::ops::Range;

use drivetrain_core::{Result, config::RecomputeModule, model::ModelSpec, plan::PlannedOp};
use drivetrain_kernels::{
    On, Rows, RowsMut,
    ops::{
        attention::{Gradients, Inputs, Saved},
        rope::{self, RopeDims},
    },
};

use super::{
    Context, Keep, Kept,
    head_norms::{HeadNorms, SavedHeadNorms},
    linear::Linear,
    planned,
};
use crate::{
    context_parallel::{self, CoreShape},
    tensor_parallel::TensorShape,
    weights::{Buffers, LayoutBuilder, Sums},
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
    pub(super) keep: Keep,
}

/// H, K and E.
#[derive(Debug, Clone, Copy)]
pub(super) struct Heads {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
}

/// What backward needs beside the input; what is `None` is computed again.
#[derive(Debug)]
pub(super) struct SavedAttention {
    qkv: Kept, // [T, (H + 2K) E]; q and k are rotated unless they are normalised
    normed: Option<SavedHeadNorms<Kept>>,
    core: Option<SavedCore<Kept>>,
}

#[derive(Debug)]
struct SavedCore<A = Buffer> {
    out: A,      // [T, H E]
    lse: Buffer, // [T, H]
}

impl<A> SavedCore<A> {
    /// With the output held otherwise.
    fn map<B>(self, hold: impl FnOnce(A) -> B) -> SavedCore<B> {
        SavedCore {
            out: hold(self.out),
            lse: self.lse,
        }
    }
}

impl Heads {
    pub(super) fn q(self) -> usize {
        self.heads * self.head_dim
    }

    pub(super) fn kv(self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Width of qkv.
    pub(super) fn qkv(self) -> usize {
        self.q() + 2 * self.kv()
    }

    pub(super) fn columns(self) -> [Range<usize>; 3] {
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
        tensor: TensorShape,
        keep: Keep,
        layout: &mut LayoutBuilder,
    ) -> Result<Self> {
        let name = |part: &str| format!("model.layers.{index}.self_attn.{part}");
        let mut stack = |parts: &[&str]| {
            let names: Vec<_> = parts.iter().map(|p| name(p)).collect();
            layout.stack(&names.iter().map(String::as_str).collect::<Vec<_>>())
        };
        // Query heads divide the tensor ranks; where key/value heads are fewer, neighbours have the same one.
        let heads = Heads {
            heads: spec.num_heads / tensor.size,
            kv_heads: (spec.num_kv_heads / tensor.size).max(1),
            head_dim: spec.head_dim,
        };
        let weight = stack(&["q_proj.weight", "k_proj.weight", "v_proj.weight"])?;
        let bias = match spec.qkv_bias {
            true => Some(stack(&["q_proj.bias", "k_proj.bias", "v_proj.bias"])?),
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
        let head_norms = match spec.qk_norm {
            true => Some(HeadNorms {
                q: stack(&["q_norm.weight"])?,
                k: stack(&["k_norm.weight"])?,
                eps: spec.rms_norm_eps,
            }),
            false => None,
        };
        Ok(Self {
            qkv,
            out,
            head_norms,
            heads,
            window: spec.layers[index].sliding_window,
            keep,
        })
    }

    /// Adds its output to `residual`.
    ///
    /// # Errors
    /// The communicator's.
    pub(super) fn forward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        x: &[f32],            // [S, D]
        residual: &mut [f32], // [S, D]
    ) -> Result<SavedAttention> {
        let mut qkv = self.qkv.column_forward(cx, params, x)?;
        let normed = self.normed(cx, params, &qkv);
        if normed.is_none() {
            let bands = RowsMut::contiguous(&mut qkv, self.heads.qkv());
            let [q, k] = bands.split_columns([self.heads.q(), self.heads.kv()]);
            rotate(cx, self.heads, rope::forward, q, k);
        }
        let core = self.core(cx, &qkv, normed.as_ref())?;
        let keep = |x| self.keep.keep(cx, x);
        let kept = |module| !self.keep.drops(module);
        let normed = normed.filter(|_| kept(RecomputeModule::Norm));
        let (qkv, normed) = (keep(qkv), normed.map(|n| n.map(keep)));
        self.out.row_forward_add(cx, params, &core.out, residual)?;
        let core = Some(core).filter(|_| kept(RecomputeModule::AttentionCore));
        Ok(SavedAttention {
            qkv,
            normed,
            core: core.map(|c| c.map(keep)),
        })
    }

    /// The gradient of x, [S, D].
    ///
    /// # Errors
    /// The communicator's.
    pub(super) fn backward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        grads: &mut Sums,
        saved: SavedAttention,
        dy: &[f32], // [S, D]
        x: &[f32],  // [S, D]
    ) -> Result<Buffer> {
        let (t, h) = (cx.packed.num_tokens(), self.heads);
        let SavedAttention { qkv, normed, core } = saved;
        let qkv = qkv.widen(cx);
        let normed = match normed {
            Some(normed) => Some(normed.map(|qk| qk.widen(cx))),
            None => self.normed(cx, params, &qkv),
        };
        let core = match core {
            Some(core) => core.map(|out| out.widen(cx)),
            None => self.core(cx, &qkv, normed.as_ref())?,
        };
        let dout = self.out.row_backward(cx, params, grads, dy, &core.out)?;
        let mut dqkv = cx.workspace.take(t * h.qkv());
        match (&self.head_norms, &normed) {
            (Some(norms), Some(normed)) => {
                let mut dqk = cx.workspace.take(t * (h.q() + h.kv()));
                let [dq, dk] = pair(&mut dqk, h);
                let [_, _, dv] = bands(&mut dqkv, h);
                let gradients = Gradients { dq, dk, dv };
                self.core_backward(cx, &inputs(h, &qkv, Some(normed)), &core, &dout, gradients)?;
                let [dq, dk] = pair(&mut dqk, h);
                rotate(cx, h, rope::backward, dq, dk);
                norms.backward(cx, params, grads, h, normed, &qkv, &dqk, &mut dqkv);
            }
            _ => {
                let [dq, dk, dv] = bands(&mut dqkv, h);
                let gradients = Gradients { dq, dk, dv };
                self.core_backward(cx, &inputs(h, &qkv, None), &core, &dout, gradients)?;
                let [dq, dk, _] = bands(&mut dqkv, h);
                rotate(cx, h, rope::backward, dq, dk);
            }
        }
        drop((dout, qkv, normed, core));
        self.qkv.column_backward(cx, params, grads, &dqkv, x)
    }

    /// q and k normalised and rotated, where the family normalises them.
    fn normed(&self, cx: &Context<'_>, params: &Buffers, qkv: &[f32]) -> Option<SavedHeadNorms> {
        let norms = self.head_norms.as_ref()?;
        let mut saved = norms.forward(cx, params, self.heads, qkv);
        let [q, k] = pair(&mut saved.qk, self.heads);
        rotate(cx, self.heads, rope::forward, q, k);
        Some(saved)
    }

    fn core(
        &self,
        cx: &Context<'_>,
        qkv: &[f32],
        normed: Option<&SavedHeadNorms>,
    ) -> Result<SavedCore> {
        let (t, h) = (cx.packed.num_tokens(), self.heads);
        let mut core = SavedCore {
            out: cx.workspace.take(t * h.q()),
            lse: cx.workspace.take(t * h.heads),
        };
        let inputs = inputs(h, qkv, normed);
        let (out, lse) = (&mut core.out, &mut core.lse);
        context_parallel::forward(cx, self.core_shape(), &inputs, out, lse)?;
        Ok(core)
    }

    fn core_backward(
        &self,
        cx: &Context<'_>,
        inputs: &Inputs<'_>,
        core: &SavedCore,
        dout: &[f32], // [T, H E]
        gradients: Gradients<'_>,
    ) -> Result<()> {
        let width = self.heads.q();
        let saved = Saved {
            out: Rows::contiguous(&core.out, width),
            lse: &core.lse,
            dout: Rows::contiguous(dout, width),
        };
        context_parallel::backward(cx, self.core_shape(), inputs, &saved, gradients)
    }

    fn core_shape(&self) -> CoreShape {
        CoreShape {
            heads: self.heads.heads,
            kv_heads: self.heads.kv_heads,
            head_dim: self.heads.head_dim,
            window: self.window,
        }
    }

    /// Its operations over one sequence of `tokens` tokens.
    pub(super) fn plan(&self, module: &str, tokens: usize) -> Vec<PlannedOp> {
        let h = self.heads;
        // Beside activations, a number in f32 for each of these.
        let kept = |module, elements, numbers| match self.keep.drops(module) {
            true => 0,
            false => self.keep.bytes(elements) + numbers * size_of::<f32>(),
        };
        let mut qkv = self.qkv.plan(format!("{module}.qkv_proj"), tokens);
        qkv.saved_bytes = self.keep.bytes(tokens * h.qkv()) as u64;
        let mut ops = vec![qkv];
        if self.head_norms.is_some() {
            let rows = tokens * (h.heads + h.kv_heads);
            ops.push(planned(
                "rms_norm",
                format!("{module}.qk_norm"),
                [rows, h.head_dim, 1],
                kept(RecomputeModule::Norm, rows * h.head_dim, rows),
            ));
        }
        let rotated = h.heads + h.kv_heads;
        ops.push(planned(
            "rope",
            format!("{module}.rope"),
            [tokens, rotated, h.head_dim],
            0,
        ));
        let (core, lse) = (tokens * h.q(), tokens * h.heads);
        ops.push(planned(
            "attention",
            format!("{module}.core"),
            [tokens, tokens, h.q()],
            kept(RecomputeModule::AttentionCore, core, lse),
        ));
        ops.push(self.out.plan(format!("{module}.o_proj"), tokens));
        ops
    }
}

type Rotation<'a> = fn(On<'a>, &RopeDims, &[u32], &[f32], &[f32], RowsMut<'_>);

fn rotate<'a>(cx: &Context<'a>, h: Heads, rotation: Rotation<'a>, q: RowsMut<'_>, k: RowsMut<'_>) {
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

/// q, k and v, or their gradients, side by side.
pub(super) fn bands(qkv: &mut [f32], h: Heads) -> [RowsMut<'_>; 3] {
    RowsMut::contiguous(qkv, h.qkv()).split_columns([h.q(), h.kv(), h.kv()])
}

/// q and k alone, side by side.
pub(super) fn pair(qk: &mut [f32], h: Heads) -> [RowsMut<'_>; 2] {
    RowsMut::contiguous(qk, h.q() + h.kv()).split_columns([h.q(), h.kv()])
}

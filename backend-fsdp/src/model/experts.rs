//! A mixture of experts: every token goes to k of X experts, which see their own tokens only.
//!
//! Shapes: T packed tokens, D model, F feed-forward, X experts, k experts a token.

use drivetrain_core::model::MoeSpec;
use tch::{Kind, Tensor};

use super::{
    block::{discard, swiglu},
    linear::linear,
};
use crate::error::Torch;

/// A layer's router and experts.
#[derive(Debug)]
pub(super) struct Experts<'a> {
    pub(super) spec: MoeSpec,
    /// Of the router's logits, softmax and choice.
    pub(super) kind: Kind,
    /// Whether what is between an expert's matrices is computed again in backward.
    pub(super) again: bool,
    /// Added to the softmax where experts are chosen, `[X]`.
    pub(super) bias: Option<&'a [f64]>,
    /// `[X, D]`.
    pub(super) router: &'a Tensor,
    /// Gate, up and down of each expert.
    pub(super) weights: &'a [Tensor],
}

/// How a layer sent its tokens.
#[derive(Debug)]
pub(crate) struct Routing {
    /// The router's softmax, `[T, X]`.
    pub(crate) probs: Tensor,
    /// Log of the sum of exponentials of its logits, `[T]`.
    pub(crate) log_sum: Tensor,
    /// The experts of each token, the first k, then the next token's.
    pub(crate) chosen: Vec<i64>,
}

impl Experts<'_> {
    /// `x` `[T, D]` through its experts, weighted and added, `[T, D]`.
    pub(super) fn forward(&self, x: &Tensor) -> Torch<(Tensor, Routing)> {
        let k = self.spec.experts_per_token as i64;
        let logits = self.logits(x)?; // [T, X]
        let probs = logits.f_softmax(-1, None::<Kind>)?;
        let chosen = self.choose(&probs)?; // [T, k]
        let mut weights = probs.f_gather(1, &chosen, false)?; // [T, k]
        if self.spec.norm_topk_prob {
            let sum = weights.f_sum_dim_intlist(&[1i64][..], true, None::<Kind>)?;
            weights = weights.f_div(&sum)?;
        }
        let experts = chosen.f_flatten(0, -1)?; // [T x k]
        // Stable: each expert sees its tokens in their order.
        let (_, order) = experts.f_sort_stable(true, 0, false)?;
        let tokens = order.f_floor_divide_scalar(k)?;
        let rows = x.f_index_select(0, &tokens)?; // [T x k, D], expert by expert
        let factors = weights
            .f_flatten(0, -1)?
            .f_index_select(0, &order)?
            .f_to_kind(x.f_kind()?)?
            .f_unsqueeze(1)?;
        let chosen = Vec::<i64>::try_from(&experts)?;
        let outputs = self.each(&rows, &chosen, x.size()[0])?.f_mul(&factors)?;
        let y = x.f_zeros_like()?.f_index_add(0, &tokens, &outputs)?;
        let log_sum = logits.f_logsumexp(&[1i64][..], false)?;
        Ok((
            y,
            Routing {
                probs,
                log_sum,
                chosen,
            },
        ))
    }

    /// The router's, `[T, X]`.
    fn logits(&self, x: &Tensor) -> Torch<Tensor> {
        if (self.kind, x.f_kind()?) == (Kind::Float, Kind::Float) {
            return linear(x, self.router, None, x.size()[0]);
        }
        let router = self.router.f_to_kind(self.kind)?;
        x.f_to_kind(self.kind)?.f_linear(&router, None::<Tensor>)
    }

    /// Columns of the k largest scores of each row, of equal ones the first, `[T, k]`.
    fn choose(&self, probs: &Tensor) -> Torch<Tensor> {
        let mut scores = probs.f_detach()?;
        if let Some(bias) = self.bias {
            let bias = Tensor::f_from_slice(bias)?.f_to_kind(self.kind)?;
            let bias = bias.f_to_device(scores.device())?;
            scores = scores.f_add(&bias)?;
        }
        let (_, order) = scores.f_sort_stable(true, 1, true)?;
        order
            .f_narrow(1, 0, self.spec.experts_per_token as i64)?
            .f_contiguous()
    }

    /// Rows that lie expert by expert through each one's `down(silu(gate(x)) up(x))`. An expert without rows takes part,
    /// so that its weights have a gradient, of 0.
    fn each(&self, rows: &Tensor, chosen: &[i64], num_tokens: i64) -> Torch<Tensor> {
        let linear = |x: &Tensor, weight| linear(x, weight, None, num_tokens);
        let mut outputs = Vec::with_capacity(self.spec.num_experts);
        let mut counts = vec![0i64; self.spec.num_experts];
        for &expert in chosen {
            counts[expert as usize] += 1;
        }
        let mut at = 0;
        for (weights, count) in self.weights.chunks_exact(3).zip(counts) {
            let rows = rows.f_narrow(0, at, count)?;
            at += count;
            let gate = linear(&rows, &weights[0])?; // [n, F]
            let up = linear(&rows, &weights[1])?;
            let (h, again) = swiglu(self.again, &gate, &up)?;
            let y = linear(&h, &weights[2])?;
            discard(again, &[&y])?;
            outputs.push(y);
        }
        Tensor::f_cat(&outputs, 0)
    }
}

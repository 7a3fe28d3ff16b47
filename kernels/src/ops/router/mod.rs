//! Router of a mixture of experts: softmax over the experts, the best k of them, and their weights.
//!
//! For every row l of logits `[X]`:
//!
//! ```text
//! p = softmax(l)        lse = log sum_e e^(l_e)
//! chosen = the k experts with the largest p_e + bias_e
//! w_j = p_chosen(j), or with renormalisation p_chosen(j) / sum_i p_chosen(i)
//! ```
//!
//! Ties go to the larger logit, then to the lower id. The bias (auxiliary-loss-free balancing: Wang et al. 2024)
//! decides who is chosen and nothing else; [`update_bias`] moves it. Renormalised weights are taken as the
//! softmax over the chosen logits, which is the same number and also defined where all chosen p are 0.
//! Qwen3-MoE's `norm_topk_prob` says whether weights are renormalised; Mixtral's are.
//!
//! Auxiliary losses take what they need from here: the load-balancing loss (Fedus et al. 2022) X sum_e f_e P_e
//! the counts and sums of [`expert_loads`], which are of any set of tokens, a sequence or a batch; the z-loss
//! (Zoph et al. 2022) the mean of lse^2. Their gradients enter [`backward`] as derivatives by p and by lse.
//!
//! The arithmetic runs in the type of the logits: f32, or f64 with logits of [`project_f64`]. Exponentials and
//! sums of f32 rows are f32. No scratch.

mod cpu;
mod float;
mod project;
pub mod reference;
#[cfg(test)]
mod tests;

pub use float::Float;
pub use project::{project_f64, project_f64_backward};

use crate::cuda::ops::router as device;
use crate::{On, check};

/// Shape of the logits and rule of choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouterDims {
    /// T.
    pub tokens: usize,
    /// X.
    pub experts: usize,
    /// k: experts a token goes to, 1 to X.
    pub top_k: usize,
    /// Whether the weights of a token sum to 1.
    pub renormalise: bool,
}

/// What [`forward`] fills.
#[derive(Debug)]
pub struct Routing<'a, F> {
    /// p `[T, X]`.
    pub probs: &'a mut [F],
    /// `[T]`.
    pub lse: &'a mut [F],
    /// Chosen experts `[T, k]`, the best first.
    pub experts: &'a mut [u32],
    /// Their weights `[T, k]`.
    pub weights: &'a mut [f32],
}

/// Chooses experts and weighs them.
///
/// # Panics
/// If k is 0 or above X.
#[track_caller]
pub fn forward<'on, F: Float>(
    on: impl Into<On<'on>>,
    dims: &RouterDims,
    logits: &[F],         // [T, X]
    bias: Option<&[f32]>, // [X]
    routing: Routing<'_, F>,
) {
    let (all, chosen) = dims.lens();
    check::len("logits", logits, all);
    check::len("probs", routing.probs, all);
    check::len("lse", routing.lse, dims.tokens);
    check::len("experts", routing.experts, chosen);
    check::len("weights", routing.weights, chosen);
    if let Some(bias) = bias {
        check::len("bias", bias, dims.experts);
    }
    match on.into() {
        On::Cpu(cpu) => cpu::forward(cpu, dims, logits, bias, routing),
        On::Device(unified) => unified.run(|call| {
            let logits = call.input(logits)?;
            let bias = bias.map(|bias| call.input(bias)).transpose()?;
            let routing = device::Routing {
                probs: call.output(routing.probs)?,
                lse: call.output(routing.lse)?,
                experts: call.output(routing.experts)?,
                weights: call.output(routing.weights)?,
            };
            device::forward(call.device(), dims, logits, bias, routing)
        }),
    }
}

/// What [`forward`] left, and the derivatives of the loss that arrive.
#[derive(Debug, Clone, Copy)]
pub struct Derivatives<'a, F> {
    /// `[T, X]`.
    pub probs: &'a [F],
    /// `[T, k]`.
    pub experts: &'a [u32],
    /// `[T, k]`.
    pub weights: &'a [f32],
    /// By the weights `[T, k]`.
    pub d_weights: &'a [f32],
    /// By p `[T, X]`, if a load-balancing loss is used.
    pub d_probs: Option<&'a [F]>,
    /// By lse `[T]`, if a z-loss is used.
    pub d_lse: Option<&'a [F]>,
}

/// Overwrites dlogits with the derivative of the loss by the logits.
///
/// # Panics
/// As [`forward`], and if a chosen expert is not below X.
#[track_caller]
pub fn backward<'on, F: Float>(
    on: impl Into<On<'on>>,
    dims: &RouterDims,
    derivatives: &Derivatives<'_, F>,
    dlogits: &mut [F], // [T, X]
) {
    let (all, chosen) = dims.lens();
    check::len("probs", derivatives.probs, all);
    check::len("weights", derivatives.weights, chosen);
    check::len("d_weights", derivatives.d_weights, chosen);
    check::len("dlogits", dlogits, all);
    if let Some(d_probs) = derivatives.d_probs {
        check::len("d_probs", d_probs, all);
    }
    if let Some(d_lse) = derivatives.d_lse {
        check::len("d_lse", d_lse, dims.tokens);
    }
    check_experts(dims, derivatives.experts);
    match on.into() {
        On::Cpu(cpu) => cpu::backward(cpu, dims, derivatives, dlogits),
        On::Device(unified) => unified.run(|call| {
            let derivatives = device::Derivatives {
                probs: call.input(derivatives.probs)?,
                experts: call.input(derivatives.experts)?,
                weights: call.input(derivatives.weights)?,
                d_weights: call.input(derivatives.d_weights)?,
                d_probs: derivatives.d_probs.map(|d| call.input(d)).transpose()?,
                d_lse: derivatives.d_lse.map(|d| call.input(d)).transpose()?,
            };
            let dlogits = call.output(dlogits)?;
            device::backward(call.device(), dims, &derivatives, dlogits)
        }),
    }
}

/// Adds, for some of the tokens, how many were sent to each expert and what p they gave it.
///
/// The load-balancing loss over n tokens is X sum_e (`counts[e]` / n) (`prob_sums[e]` / n); its derivative by
/// p of one of them is X `counts[e]` / n^2.
#[track_caller]
pub fn expert_loads<F: Float>(
    dims: &RouterDims,
    tokens: impl Iterator<Item = usize>,
    experts: &[u32],       // [T, k]
    probs: &[F],           // [T, X]
    counts: &mut [u64],    // [X]
    prob_sums: &mut [f64], // [X]
) {
    check::len("probs", probs, dims.lens().0);
    check::len("counts", counts, dims.experts);
    check::len("prob_sums", prob_sums, dims.experts);
    check_experts(dims, experts);
    for t in tokens {
        for &expert in &experts[t * dims.top_k..][..dims.top_k] {
            counts[expert as usize] += 1;
        }
        for (sum, &p) in prob_sums.iter_mut().zip(&probs[t * dims.experts..]) {
            *sum += p.to_f64();
        }
    }
}

/// Raises the bias of experts with less than their share of tokens by `rate`, lowers it where they have more.
#[track_caller]
pub fn update_bias(
    rate: f32,
    counts: &[u64],   // [X]
    bias: &mut [f32], // [X]
) {
    check::len("bias", bias, counts.len());
    let total: u128 = counts.iter().map(|&count| u128::from(count)).sum();
    for (bias, &count) in bias.iter_mut().zip(counts) {
        match (u128::from(count) * counts.len() as u128).cmp(&total) {
            std::cmp::Ordering::Less => *bias += rate,
            std::cmp::Ordering::Equal => {}
            std::cmp::Ordering::Greater => *bias -= rate,
        }
    }
}

impl RouterDims {
    /// Elements of `[T, X]` and of `[T, k]`.
    #[track_caller]
    fn lens(&self) -> (usize, usize) {
        assert!(
            (1..=self.experts).contains(&self.top_k),
            "router: {} of {} experts a token",
            self.top_k,
            self.experts
        );
        (self.tokens * self.experts, self.tokens * self.top_k)
    }
}

#[track_caller]
fn check_experts(dims: &RouterDims, experts: &[u32]) {
    check::len("experts", experts, dims.lens().1);
    if let Some(slot) = experts.iter().position(|&e| e as usize >= dims.experts) {
        panic!(
            "router: expert {} of token {} is not below {}",
            experts[slot],
            slot / dims.top_k,
            dims.experts
        );
    }
}

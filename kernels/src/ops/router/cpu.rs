//! A token at a time.

use std::ops::Range;

use pulp::Simd;

use super::{Derivatives, Float, RouterDims, Routing};
use crate::Cpu;
use crate::rows::SharedMut;

/// Tokens below which a second thread does not pay.
const STEP: usize = 64;

pub(super) fn forward<F: Float>(
    cpu: Cpu,
    dims: &RouterDims,
    logits: &[F],
    bias: Option<&[f32]>,
    routing: Routing<'_, F>,
) {
    let (x, k) = (dims.experts, dims.top_k);
    let (probs, lse) = (SharedMut::new(routing.probs), SharedMut::new(routing.lse));
    let (experts, weights) = (
        SharedMut::new(routing.experts),
        SharedMut::new(routing.weights),
    );
    cpu.for_ranges(dims.tokens, STEP, |tokens| {
        let (all, chosen) = (
            tokens.start * x..tokens.end * x,
            tokens.start * k..tokens.end * k,
        );
        // SAFETY: for_ranges hands out disjoint ranges of tokens.
        let part = unsafe {
            Routing {
                probs: probs.range(all.clone()),
                lse: lse.range(tokens),
                experts: experts.range(chosen.clone()),
                weights: weights.range(chosen),
            }
        };
        dispatch!(cpu, forward_rows, dims, &logits[all], bias, part);
    });
}

#[inline(always)]
fn forward_rows<S: Simd, F: Float>(
    _: S,
    dims: &RouterDims,
    logits: &[F],
    bias: Option<&[f32]>,
    routing: Routing<'_, F>,
) {
    let outputs = routing
        .probs
        .chunks_mut(dims.experts)
        .zip(routing.lse)
        .zip(routing.experts.chunks_mut(dims.top_k))
        .zip(routing.weights.chunks_mut(dims.top_k));
    for (logits, (((probs, lse), experts), weights)) in logits.chunks(dims.experts).zip(outputs) {
        let peak = largest(logits);
        let mut sum = F::default();
        for (p, &l) in probs.iter_mut().zip(logits) {
            *p = (l - peak).exp_of_negative::<S>();
        }
        for &p in &*probs {
            sum = sum + p;
        }
        *lse = peak + sum.ln();
        for p in &mut *probs {
            *p = *p / sum;
        }
        choose(logits, probs, bias, experts);
        weigh::<S, F>(dims, logits, probs, experts, weights);
    }
}

fn largest<F: Float>(x: &[F]) -> F {
    x.iter()
        .fold(F::NEG_INFINITY, |m, &x| if x > m { x } else { m })
}

/// Fills `chosen` with the best experts, the best first.
fn choose<F: Float>(logits: &[F], probs: &[F], bias: Option<&[f32]>, chosen: &mut [u32]) {
    let score = |e: usize| match bias {
        Some(bias) => probs[e] + F::from_f32(bias[e]),
        None => probs[e],
    };
    // Experts come in the order of their ids, so one that is no better than another goes after it.
    let better = |a: usize, b: usize| {
        let (x, y) = (score(a), score(b));
        x > y || (x == y && logits[a] > logits[b])
    };
    for e in 0..logits.len() {
        let kept = e.min(chosen.len());
        if kept == chosen.len() && !better(e, chosen[kept - 1] as usize) {
            continue;
        }
        let mut at = if kept == chosen.len() { kept - 1 } else { kept };
        while at > 0 && better(e, chosen[at - 1] as usize) {
            chosen[at] = chosen[at - 1];
            at -= 1;
        }
        chosen[at] = e as u32;
    }
}

#[inline(always)]
fn weigh<S: Simd, F: Float>(
    dims: &RouterDims,
    logits: &[F],
    probs: &[F],
    chosen: &[u32],
    weights: &mut [f32],
) {
    if !dims.renormalise {
        for (w, &e) in weights.iter_mut().zip(chosen) {
            *w = probs[e as usize].to_f32();
        }
        return;
    }
    let logit = |e: u32| logits[e as usize];
    let peak = chosen.iter().fold(
        F::NEG_INFINITY,
        |m, &e| if logit(e) > m { logit(e) } else { m },
    );
    let part = |e: u32| (logit(e) - peak).exp_of_negative::<S>();
    let sum: F = chosen.iter().map(|&e| part(e)).sum();
    for (w, &e) in weights.iter_mut().zip(chosen) {
        *w = (part(e) / sum).to_f32();
    }
}

pub(super) fn backward<F: Float>(
    cpu: Cpu,
    dims: &RouterDims,
    derivatives: &Derivatives<'_, F>,
    dlogits: &mut [F],
) {
    let dlogits = SharedMut::new(dlogits);
    cpu.for_ranges(dims.tokens, STEP, |tokens| {
        // SAFETY: for_ranges hands out disjoint ranges of tokens.
        let part = unsafe { dlogits.range(tokens.start * dims.experts..tokens.end * dims.experts) };
        dispatch!(cpu, backward_rows, dims, derivatives, tokens.clone(), part);
    });
}

#[inline(always)]
fn backward_rows<S: Simd, F: Float>(
    _: S,
    dims: &RouterDims,
    d: &Derivatives<'_, F>,
    tokens: Range<usize>,
    dlogits: &mut [F],
) {
    for (t, dlogits) in tokens.zip(dlogits.chunks_mut(dims.experts)) {
        let all = t * dims.experts..(t + 1) * dims.experts;
        let chosen = t * dims.top_k..(t + 1) * dims.top_k;
        let (probs, experts) = (&d.probs[all.clone()], &d.experts[chosen.clone()]);
        let (weights, d_weights) = (&d.weights[chosen.clone()], &d.d_weights[chosen]);
        // dlogits first holds the derivative by p.
        match d.d_probs {
            Some(d_probs) => dlogits.copy_from_slice(&d_probs[all]),
            None => dlogits.fill(F::default()),
        }
        if !dims.renormalise {
            for (&e, &dw) in experts.iter().zip(d_weights) {
                dlogits[e as usize] = dlogits[e as usize] + F::from_f32(dw);
            }
        }
        let mut mean = F::default();
        for (&p, &dp) in probs.iter().zip(&*dlogits) {
            mean = mean + p * dp;
        }
        let level = d.d_lse.map_or(F::default(), |d_lse| d_lse[t]) - mean;
        for (dl, &p) in dlogits.iter_mut().zip(probs) {
            *dl = p * (*dl + level);
        }
        if dims.renormalise {
            let parts = || weights.iter().zip(d_weights);
            let mean: F = parts()
                .map(|(&w, &dw)| F::from_f32(w) * F::from_f32(dw))
                .sum();
            for (&e, (&w, &dw)) in experts.iter().zip(parts()) {
                let dl = &mut dlogits[e as usize];
                *dl = *dl + F::from_f32(w) * (F::from_f32(dw) - mean);
            }
        }
    }
}

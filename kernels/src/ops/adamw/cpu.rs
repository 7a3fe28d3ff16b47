//! One fused pass.

use pulp::Simd;

use super::AdamW;
use crate::Cpu;
use crate::rows::SharedMut;
use crate::simd::fma;

#[derive(Clone, Copy)]
struct Factors {
    keep: f32,
    grad_scale: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    step_size: f32,
    inv_root: f32,
    eps: f32,
}

impl Factors {
    fn new(config: &AdamW) -> Self {
        let t = config.step as f64;
        let correction1 = 1.0 - config.beta1.powf(t);
        let correction2 = 1.0 - config.beta2.powf(t);
        Self {
            keep: (1.0 - config.lr * config.weight_decay) as f32,
            grad_scale: config.grad_scale as f32,
            one_minus_beta1: (1.0 - config.beta1) as f32,
            beta2: config.beta2 as f32,
            one_minus_beta2: (1.0 - config.beta2) as f32,
            step_size: (config.lr / correction1) as f32,
            inv_root: (1.0 / correction2.sqrt()) as f32,
            eps: config.eps as f32,
        }
    }
}

pub(super) fn update(
    cpu: Cpu,
    config: &AdamW,
    p: &mut [f32],
    g: &[f32],
    m: &mut [f32],
    v: &mut [f32],
) {
    let factors = Factors::new(config);
    let len = p.len();
    let (p, m, v) = (SharedMut::new(p), SharedMut::new(m), SharedMut::new(v));
    cpu.for_ranges(len, 1 << 12, |range| {
        // SAFETY: for_ranges hands out disjoint ranges.
        let (p, m, v) = unsafe {
            (
                p.range(range.clone()),
                m.range(range.clone()),
                v.range(range.clone()),
            )
        };
        dispatch!(cpu, update_range, factors, p, &g[range.clone()], m, v);
    });
}

#[inline(always)]
fn update_range<S: Simd>(_: S, f: Factors, p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32]) {
    for ((p, &g), (m, v)) in p.iter_mut().zip(g).zip(m.iter_mut().zip(v)) {
        let g = g * f.grad_scale;
        *m = fma::<S>(f.one_minus_beta1, g - *m, *m);
        *v = fma::<S>(f.beta2, *v, f.one_minus_beta2 * g * g);
        let denominator = fma::<S>(v.sqrt(), f.inv_root, f.eps);
        *p = fma::<S>(*p, f.keep, -(f.step_size * (*m / denominator)));
    }
}

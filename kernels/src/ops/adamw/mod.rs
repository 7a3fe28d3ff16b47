//! AdamW (Loshchilov and Hutter 2019) with decoupled decay, as torch.optim.AdamW computes it.
//!
//! For every element, with g scaled first by `grad_scale` and t = `step` counted from 1:
//!
//! ```text
//! p <- p (1 - lr weight_decay)
//! m <- m + (1 - beta1) (g - m)
//! v <- beta2 v + (1 - beta2) g^2
//! p <- p - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//! ```
//!
//! p, g, m, v are f32; factors are computed in f64 and rounded once. One pass over memory; no scratch.

mod cpu;
pub mod reference;
#[cfg(test)]
mod tests;

use crate::cuda::ops::adamw as device;
use crate::{On, check};

/// The factors of one step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled decay; 0 for parameters that do not decay.
    pub weight_decay: f64,
    /// The number of this step, from 1.
    pub step: u64,
    /// Multiplies the gradient: the clip factor, 1 for none.
    pub grad_scale: f64,
}

/// Updates p, m and v in place.
///
/// # Panics
/// If the step is 0 or lengths differ.
#[track_caller]
pub fn update<'on>(
    on: impl Into<On<'on>>,
    config: &AdamW,
    p: &mut [f32],
    g: &[f32],
    m: &mut [f32],
    v: &mut [f32],
) {
    assert!(config.step > 0, "adamw: steps count from 1");
    check::len("g", g, p.len());
    check::len("m", m, p.len());
    check::len("v", v, p.len());
    match on.into() {
        On::Cpu(cpu) => cpu::update(cpu, config, p, g, m, v),
        On::Device(unified) => unified.run(|call| {
            let (p, g) = (call.output(p)?, call.input(g)?);
            let (m, v) = (call.output(m)?, call.output(v)?);
            device::update(call.device(), config, p, g, m, v)
        }),
    }
}

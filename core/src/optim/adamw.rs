//! AdamW in f64, element by element: the truth for fused updates.

use crate::{config::OptimizerConfig, model::ParameterSpec};

/// The scalars of one AdamW update of one parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamwStep {
    /// Learning rate of this step.
    pub learning_rate: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the corrected second moment.
    pub epsilon: f64,
    /// Decoupled weight decay of this parameter.
    pub weight_decay: f64,
    /// What the gradient is multiplied by first: the clip factor (over the deferred divisor, if any).
    pub gradient_scale: f64,
    /// Updates so far, this one included: n + 1 at optimizer step n.
    pub count: u64,
}

impl AdamwStep {
    /// The scalars for `parameter` at optimizer step `step` (from 0).
    pub fn new(
        config: &OptimizerConfig,
        parameter: &ParameterSpec,
        step: u64,
        learning_rate: f64,
        gradient_scale: f64,
    ) -> Self {
        Self {
            learning_rate,
            beta1: config.beta1,
            beta2: config.beta2,
            epsilon: config.epsilon,
            weight_decay: super::weight_decay(config, parameter),
            gradient_scale,
            count: step + 1,
        }
    }

    /// `1 - beta1^count`: what the first moment is divided by.
    pub fn bias_correction1(&self) -> f64 {
        1.0 - self.beta1.powf(self.count as f64)
    }

    /// `1 - beta2^count`: what the second moment is divided by.
    pub fn bias_correction2(&self) -> f64 {
        1.0 - self.beta2.powf(self.count as f64)
    }
}

/// One AdamW update (Kingma and Ba 2015, algorithm 1; decoupled decay: Loshchilov and Hutter 2019,
/// algorithm 2), in the order of `torch.optim.AdamW`: the weight decays first, by `1 - lr * decay`.
///
/// All slices are one parameter's elements, of equal length: `weight`, `gradient` (before scaling), first
/// moment `exp_avg`, second moment `exp_avg_sq`.
///
/// # Panics
/// If the lengths differ.
pub fn adamw_reference(
    step: &AdamwStep,
    weight: &mut [f64],
    gradient: &[f64],
    exp_avg: &mut [f64],
    exp_avg_sq: &mut [f64],
) {
    let n = weight.len();
    assert!(
        gradient.len() == n && exp_avg.len() == n && exp_avg_sq.len() == n,
        "adamw_reference: weight, gradient and moments must have one length"
    );
    let (correction1, correction2) = (step.bias_correction1(), step.bias_correction2());
    for i in 0..n {
        let g = gradient[i] * step.gradient_scale;
        weight[i] *= 1.0 - step.learning_rate * step.weight_decay;
        exp_avg[i] = step.beta1 * exp_avg[i] + (1.0 - step.beta1) * g;
        exp_avg_sq[i] = step.beta2 * exp_avg_sq[i] + (1.0 - step.beta2) * g * g;
        let denominator = (exp_avg_sq[i] / correction2).sqrt() + step.epsilon;
        weight[i] -= step.learning_rate * (exp_avg[i] / correction1) / denominator;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_steps_by_hand() {
        let mut step = AdamwStep {
            learning_rate: 0.1,
            beta1: 0.9,
            beta2: 0.99,
            epsilon: 0.0,
            weight_decay: 0.5,
            gradient_scale: 0.5,
            count: 1,
        };
        let (mut w, mut m, mut v) = ([2.0], [0.0], [0.0]);
        adamw_reference(&step, &mut w, &[8.0], &mut m, &mut v);
        // g = 4; the decayed weight is 1.9; m = 0.4, v = 0.16; both corrected give 4 / 4 = 1.
        assert!((m[0] - 0.4).abs() < 1e-12 && (v[0] - 0.16).abs() < 1e-12);
        assert!((w[0] - 1.8).abs() < 1e-12, "{}", w[0]);
        step.count = 2;
        adamw_reference(&step, &mut w, &[-4.0], &mut m, &mut v);
        // g = -2; w decays to 1.71; m = 0.36 - 0.2 = 0.16, v = 0.1584 + 0.04 = 0.1984.
        let update = 0.1 * (0.16 / 0.19) / (0.1984_f64 / 0.0199).sqrt();
        assert!((w[0] - (1.71 - update)).abs() < 1e-12, "{}", w[0]);
    }

    #[test]
    fn a_zero_gradient_only_decays() {
        let step = AdamwStep {
            learning_rate: 0.1,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            gradient_scale: 1.0,
            count: 1,
        };
        let (mut w, mut m, mut v) = ([1.0, -1.0], [0.0; 2], [0.0; 2]);
        adamw_reference(&step, &mut w, &[0.0; 2], &mut m, &mut v);
        assert_eq!(w, [0.99, -0.99]);
    }
}

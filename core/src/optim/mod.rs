//! What a step does to a weight, the same for every engine: learning rate, decay, clipping, AdamW.
//!
//! Engines fuse these into their own kernels; [`adamw_reference`] is the f64 truth that those are tested
//! against. Optimizer step n counts from 0: it uses `LearningRate::at(n)`, and the bias correction of AdamW
//! uses n + 1.

mod adamw;
mod decide;
mod learning_rate;

pub use adamw::{AdamwStep, adamw_reference};
pub use decide::{Decision, committed, decide};
pub use learning_rate::LearningRate;

use crate::{
    config::{JobConfig, OptimizerConfig},
    model::{ParameterKind, ParameterSpec},
};

/// What the whole gradient is multiplied by so that its global 2-norm is at most `max_norm`:
/// `min(1, max_norm / (norm + 1e-6))`, and 1 where there is no limit.
///
/// `norm` is that of all parameters together, each counted once: clipping tensor by tensor would turn the
/// gradient. A norm that is not finite gives NaN or 0; [`decide`] skips such a step.
pub fn clip_factor(norm: f64, max_norm: Option<f64>) -> f64 {
    match max_norm {
        // Not `f64::min`, which would hide a NaN.
        Some(max) => {
            let factor = max / (norm + 1e-6);
            if factor > 1.0 { 1.0 } else { factor }
        }
        None => 1.0,
    }
}

/// Whether a job changes a parameter at all. One that it does not has gradient 0, is no part of the norm, and neither
/// decays nor moves; its moments are saved as 0.
pub fn is_trained(config: &JobConfig, parameter: &ParameterSpec) -> bool {
    !(config.moe.frozen_router && parameter.kind == ParameterKind::Router)
}

/// The decoupled weight decay of a parameter: 0 for 1-D parameters (norms, biases) unless `decay_1d`.
pub fn weight_decay(config: &OptimizerConfig, parameter: &ParameterSpec) -> f64 {
    if parameter.shape.len() >= 2 || config.decay_1d {
        config.weight_decay
    } else {
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, model::ParameterKind};

    fn norm(gradients: &[Vec<f64>]) -> f64 {
        gradients
            .iter()
            .flatten()
            .map(|g| g * g)
            .sum::<f64>()
            .sqrt()
    }

    fn clipped(gradients: &[Vec<f64>], max: f64) -> Vec<Vec<f64>> {
        let factor = clip_factor(norm(gradients), Some(max));
        let scale = |g: &Vec<f64>| g.iter().map(|x| x * factor).collect();
        gradients.iter().map(scale).collect()
    }

    #[test]
    fn clipping_is_global_not_per_tensor() {
        // Norms 3 and 4: together 5, so that each shrinks by 5, not to 1 each.
        let gradients = [vec![3.0, 0.0], vec![0.0, 4.0]];
        let clipped = clipped(&gradients, 1.0);
        for (tensor, expected) in clipped.iter().zip([0.6, 0.8]) {
            let found = norm(std::slice::from_ref(tensor));
            assert!(
                !((found - expected).abs() > 1e-6 || found.is_nan()),
                "{found}"
            );
        }
    }

    #[test]
    fn the_norm_computed_again_after_clipping_is_the_limit() {
        let gradients = [vec![0.3, -2.0, 1.0], vec![0.5], vec![-1.5, 0.25]];
        let found = norm(&clipped(&gradients, 0.01));
        assert!((found - 0.01).abs() <= 1e-6, "{found}");
    }

    #[test]
    fn small_gradients_and_no_limit_leave_the_gradient() {
        assert_eq!(clip_factor(0.5, Some(1.0)), 1.0);
        assert_eq!(clip_factor(0.0, Some(1.0)), 1.0);
        assert_eq!(clip_factor(50.0, None), 1.0);
        assert!(clip_factor(f64::NAN, Some(1.0)).is_nan());
    }

    #[test]
    fn vectors_do_not_decay_unless_asked() {
        let parameter = |shape: &[usize]| ParameterSpec {
            name: "p".into(),
            shape: shape.to_vec(),
            kind: ParameterKind::Norm,
            layer: None,
            expert: None,
            dtype: DType::F32,
        };
        let mut config = OptimizerConfig {
            weight_decay: 0.1,
            ..OptimizerConfig::default()
        };
        assert_eq!(weight_decay(&config, &parameter(&[4])), 0.0);
        assert_eq!(weight_decay(&config, &parameter(&[4, 1])), 0.1);
        config.decay_1d = true;
        assert_eq!(weight_decay(&config, &parameter(&[4])), 0.1);
    }
}

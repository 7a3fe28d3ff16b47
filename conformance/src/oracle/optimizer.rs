//! AdamW with decoupled decay and the global clip, as the papers and `torch.optim.AdamW` have them.

use drivetrain_core::{config::OptimizerConfig, model::ParameterSpec};
use indexmap::IndexMap;

use super::{defect::Defect, matrix::Matrix, model::Parameters, score::zeros_like};

/// Moments of every parameter.
#[derive(Debug, Clone)]
pub(super) struct AdamW {
    pub(super) exp_avg: IndexMap<String, Matrix>,
    pub(super) exp_avg_sq: IndexMap<String, Matrix>,
}

/// AdamW's update of one element.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Element {
    pub(crate) weight: f64,
    pub(crate) exp_avg: f64,
    pub(crate) exp_avg_sq: f64,
}

/// The numbers of one step that are the same for every element of a parameter.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepSize {
    pub(crate) optimizer: OptimizerConfig,
    pub(crate) learning_rate: f64,
    pub(crate) weight_decay: f64,
    /// `1 - beta1^n` after n updates, this one included.
    correction1: f64,
    /// `1 - beta2^n`.
    correction2: f64,
}

impl StepSize {
    pub(crate) fn new(
        optimizer: &OptimizerConfig,
        parameter: &ParameterSpec,
        learning_rate: f64,
        count: u64,
    ) -> Self {
        let correction = |beta: f64| 1.0 - beta.powf(count as f64);
        let decays = optimizer.decay_1d || parameter.shape.len() > 1;
        Self {
            optimizer: *optimizer,
            learning_rate,
            weight_decay: if decays { optimizer.weight_decay } else { 0.0 },
            correction1: correction(optimizer.beta1),
            correction2: correction(optimizer.beta2),
        }
    }

    pub(crate) fn update(&self, x: &mut Element, gradient: f64, defect: Option<Defect>) {
        let is = |d| defect == Some(d);
        let (b1, b2) = (self.optimizer.beta1, self.optimizer.beta2);
        let mut g = gradient;
        if is(Defect::DecayInGradient) {
            g += self.weight_decay * x.weight;
        } else {
            x.weight *= 1.0 - self.learning_rate * self.weight_decay;
        }
        x.exp_avg = b1 * x.exp_avg + (1.0 - b1) * g;
        x.exp_avg_sq = b2 * x.exp_avg_sq + (1.0 - b2) * g * g;
        let (mut m, mut v) = (
            x.exp_avg / self.correction1,
            x.exp_avg_sq / self.correction2,
        );
        if is(Defect::NoBiasCorrection) {
            (m, v) = (x.exp_avg, x.exp_avg_sq);
        }
        let root = if is(Defect::EpsilonUnderRoot) {
            (v + self.optimizer.epsilon).sqrt()
        } else {
            v.sqrt() + self.optimizer.epsilon
        };
        x.weight -= self.learning_rate * m / root;
    }
}

impl AdamW {
    pub(super) fn new(weights: &Parameters) -> Self {
        Self {
            exp_avg: zeros_like(weights),
            exp_avg_sq: zeros_like(weights),
        }
    }

    /// Updates one parameter with a gradient that is already clipped.
    pub(super) fn update(
        &mut self,
        name: &str,
        weight: &mut Matrix,
        gradient: &Matrix,
        size: &StepSize,
        defect: Option<Defect>,
    ) {
        let exp_avg = &mut self.exp_avg[name].data;
        let exp_avg_sq = &mut self.exp_avg_sq[name].data;
        for (i, &g) in gradient.data.iter().enumerate() {
            let mut x = Element {
                weight: weight.data[i],
                exp_avg: exp_avg[i],
                exp_avg_sq: exp_avg_sq[i],
            };
            size.update(&mut x, g, defect);
            (weight.data[i], exp_avg[i], exp_avg_sq[i]) = (x.weight, x.exp_avg, x.exp_avg_sq);
        }
    }
}

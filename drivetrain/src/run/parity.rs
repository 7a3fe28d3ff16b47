//! Whether engines agree: each against the one held for true, by the conformance suite's own tolerances.

use drivetrain_conformance::{
    compare::{Bound, Comparison, compare, largest},
    tolerance::{TensorStep, Tolerances, weight_after},
};
use drivetrain_core::{Result, config::OptimizerConfig, model::ModelSpec, weights::WeightSource};
use serde::Serialize;

use super::{compare::BackendRun, evidence::Evidence};

/// Steps whose gradients and weights are compared. Beyond a few steps no bound can be derived: two right runs
/// drift apart, as two runs in another order of summation do.
pub const PARITY_STEPS: usize = 3;

/// One engine against the one held for true.
#[derive(Debug, Clone, Serialize)]
pub struct Parity {
    /// The engine.
    pub backend: String,
    /// The one held for true.
    pub truth: String,
    /// Worst log-prob of the first batch.
    pub log_probs: Comparison,
    /// The first step's gradient: the parameter that uses most of its tolerance.
    pub gradient: Comparison,
    /// Weights after [`PARITY_STEPS`] steps (or all, if fewer): the parameter that uses most.
    pub weights: Comparison,
    /// Largest difference of a loss over all steps, for information.
    pub loss_gap: f64,
}

impl Parity {
    /// Whether all three are within tolerance.
    pub fn agrees(&self) -> bool {
        self.comparisons().iter().all(|c| c.passed())
    }

    /// The three.
    pub fn comparisons(&self) -> [&Comparison; 3] {
        [&self.log_probs, &self.gradient, &self.weights]
    }
}

/// What every engine is held against.
pub(super) struct Truth<'a> {
    pub(super) model: &'a ModelSpec,
    pub(super) optimizer: &'a OptimizerConfig,
    /// The weights that all began with.
    pub(super) start: &'a dyn WeightSource,
    /// The longest sequence of the first batch.
    pub(super) longest: usize,
    pub(super) run: BackendRun,
    pub(super) evidence: Evidence,
}

impl Truth<'_> {
    /// Holds a run against this one.
    pub(super) fn judge(&self, run: &BackendRun, found: &Evidence) -> Result<Parity> {
        let exact = &self.evidence;
        let magnitude = largest(&exact.log_probs);
        let off = |run: &BackendRun| {
            let own = Tolerances::derived(self.model, run.compute, self.longest, magnitude);
            match run.saved_activations {
                Some(dtype) if dtype != run.compute && !run.exact => {
                    own.saved_in(dtype, self.model)
                }
                _ => own,
            }
        };
        let tolerances = off(run).plus(off(&self.run));
        let moved: Vec<_> = exact
            .steps
            .iter()
            .map(|step| tolerances.gradients_of(&step.gradients.magnitudes()))
            .collect();
        let first = |evidence: &Evidence, name: &str| match evidence.steps.first() {
            Some(step) => step.gradients.values(name).into_owned(),
            None => Vec::new(),
        };
        let gradients = moved.iter().take(1).flatten().map(|(name, &moved)| {
            let (found, expected) = (first(found, name), first(exact, name));
            compare("gradient", name, &found, &expected, Bound::Uniform(moved))
        });
        let mut weights = None;
        for spec in self.model.parameters() {
            let name = spec.name.as_str();
            let gradients: Vec<_> = exact
                .steps
                .iter()
                .map(|step| step.gradients.values(name))
                .collect();
            let steps: Vec<_> = exact
                .steps
                .iter()
                .zip(&gradients)
                .zip(&moved)
                .map(|((step, gradient), moved)| TensorStep {
                    gradient,
                    moved: moved[name],
                    clip_factor: step.clip_factor,
                    learning_rate: step.learning_rate,
                })
                .collect();
            let start = self.start.read_f64(name)?;
            let bounds = weight_after(&spec, self.optimizer, &start, &steps, &tolerances);
            let (found, expected) = (found.weights.values(name), exact.weights.values(name));
            let next = compare("weights", name, &found, &expected, Bound::Each(&bounds));
            weights = worse(weights, next);
        }
        let nothing =
            |quantity| compare(quantity, "nothing was compared", &[], &[0.0], Bound::Exact);
        let losses = run.losses.iter().zip(&self.run.losses);
        Ok(Parity {
            backend: run.backend.clone(),
            truth: self.run.backend.clone(),
            log_probs: compare(
                "log_probs",
                "",
                &found.log_probs,
                &exact.log_probs,
                Bound::Uniform(tolerances.log_prob),
            ),
            gradient: gradients
                .fold(None, worse)
                .unwrap_or_else(|| nothing("gradient")),
            weights: weights.unwrap_or_else(|| nothing("weights")),
            loss_gap: losses.fold(0.0f64, |m, (a, b)| m.max((a - b).abs())),
        })
    }
}

/// That of the tensor which uses more of its tolerance.
fn worse(a: Option<Comparison>, b: Comparison) -> Option<Comparison> {
    match a {
        Some(a) if a.fault.is_some() || b.fault.is_none() && b.share <= a.share => Some(a),
        _ => Some(b),
    }
}

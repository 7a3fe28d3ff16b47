//! Whether engines agree: each against the one held for true, by the conformance suite's own tolerances.

use drivetrain_conformance::{
    compare::{Bound, Comparison, compare},
    tolerance::{Tensors, Tolerances, weights_after},
};
use drivetrain_core::{batch::Batch, config::OptimizerConfig, model::ModelSpec};
use serde::Serialize;

use super::compare::BackendRun;

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

/// Holds every run against the exact one, or the first where none is exact.
pub(super) fn judge(
    model: &ModelSpec,
    optimizer: &OptimizerConfig,
    first: &Batch,
    runs: &[BackendRun],
) -> Vec<Parity> {
    let Some(truth) = runs.iter().find(|r| r.exact).or(runs.first()) else {
        return Vec::new();
    };
    let longest = first.lengths().into_iter().max().unwrap_or(0);
    let magnitude = truth
        .evidence
        .log_probs
        .iter()
        .fold(0.0f64, |m, v| m.max(v.abs()));
    let off = |run: &BackendRun| Tolerances::derived(model, run.compute, longest, magnitude);
    let evidence = &truth.evidence;
    let parameters = model.parameters();
    let gradients = evidence.steps.first().map(|s| &s.gradients);
    let others = runs.iter().filter(|r| !std::ptr::eq(*r, truth));
    others
        .map(|run| {
            let found = &run.evidence;
            let tolerances = off(run).plus(off(truth));
            let bounds = weights_after(
                &parameters,
                optimizer,
                &evidence.start,
                &evidence.steps,
                &tolerances,
            );
            let log_probs = compare(
                "log_probs",
                "",
                &found.log_probs,
                &evidence.log_probs,
                Bound::Uniform(tolerances.log_prob),
            );
            let empty = Tensors::new();
            let expected = gradients.unwrap_or(&empty);
            let of_run = found.steps.first().map_or(&empty, |s| &s.gradients);
            let by_tensor = tolerances.gradients(expected);
            Parity {
                backend: run.backend.clone(),
                truth: truth.backend.clone(),
                log_probs,
                gradient: worst("gradient", of_run, expected, |name| {
                    Bound::Uniform(by_tensor[name])
                }),
                weights: worst("weights", &found.weights, &evidence.weights, |name| {
                    Bound::Each(&bounds[name])
                }),
                loss_gap: run
                    .losses
                    .iter()
                    .zip(&truth.losses)
                    .fold(0.0f64, |m, (a, b)| m.max((a - b).abs())),
            }
        })
        .collect()
}

/// The tensor that uses most of its tolerance; a missing one fails.
fn worst<'a>(
    quantity: &str,
    found: &Tensors,
    expected: &Tensors,
    bound: impl Fn(&str) -> Bound<'a>,
) -> Comparison {
    let none: &[f64] = &[];
    let each = expected.iter().map(|(name, values)| {
        let found = found.get(name).map_or(none, Vec::as_slice);
        compare(quantity, name, found, values, bound(name))
    });
    each.reduce(|a, b| {
        if b.share > a.share || b.fault.is_some() && a.fault.is_none() {
            b
        } else {
            a
        }
    })
    .unwrap_or_else(|| compare(quantity, "nothing was compared", none, &[0.0], Bound::Exact))
}

//! The cases, by what they look at.

mod against_oracle;
mod awkward;
mod checkpoints;
mod compute_bf16;
mod cross_engine;
mod engine_state;
mod experts;
mod five_steps;
mod generated;
mod golden;
mod large;
mod layouts;
mod lost_rank;
mod many_layouts;
mod objectives;
mod one_rank;
mod refusals;
mod refused_jobs;
mod saved_activations;
mod snapshots;
mod step;
mod uneven;

use std::sync::Arc;

use drivetrain_core::engine::Backend;

use crate::{
    compare::Bound,
    suite::{Case, Findings},
    tolerance::{Tensors, Tolerances},
};

/// Every case, for a suite of these backends (some cases compare them with each other).
pub fn all(backends: &[Arc<dyn Backend>]) -> Vec<Case> {
    [
        golden::cases(),
        against_oracle::cases(),
        large::cases(),
        layouts::cases(),
        experts::cases(),
        engine_state::cases(),
        checkpoints::cases(backends),
        awkward::cases(),
        uneven::cases(),
        lost_rank::cases(),
        many_layouts::cases(),
        compute_bf16::cases(),
        saved_activations::cases(),
        generated::cases(),
        objectives::cases(),
        refusals::cases(),
        refused_jobs::cases(),
        cross_engine::cases(backends),
    ]
    .concat()
}

/// Every parameter's gradient, within its tolerance.
fn check_gradients(
    findings: &mut Findings,
    tolerances: &Tolerances,
    found: &Tensors,
    exact: &Tensors,
) {
    let bounds = tolerances.gradients(exact);
    for (name, expected) in exact {
        let found = found.get(name).map(Vec::as_slice).unwrap_or_default();
        let bound = Bound::Uniform(bounds[name]);
        findings.check("gradient", name, found, expected, bound);
    }
    let known = found.len() == exact.len();
    findings.fact("every gradient is of a known parameter", known);
}

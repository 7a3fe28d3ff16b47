//! One step of a backend beside the oracle's: what most cases compare.

use std::sync::Arc;

use drivetrain_core::{
    Result,
    batch::{Batch, BatchTotals},
    engine::{Engine, ScoreRequest, StepOptions},
    metrics::Metrics,
    model::ModelSpec,
    moe::{LOAD_BALANCING_LOSS, ROUTER_Z_LOSS},
    objective::{Nll, Objective, TokenOutputs},
    weights::MemoryWeights,
};

use crate::{
    compare::{Bound, largest},
    objective::Watched,
    oracle::{ROUTER_MARGIN, ReferenceBackend},
    suite::{Findings, Layout, Subject},
    tolerance::{Tensors, Tolerances},
    train::gradients,
};

/// A model with its first weights.
#[derive(Debug)]
pub(super) struct Setting<'a> {
    pub(super) model: &'a ModelSpec,
    pub(super) weights: MemoryWeights,
}

/// What one step reports.
#[derive(Debug, Clone)]
pub(super) struct Step {
    pub(super) loss: f64,
    pub(super) metrics: Metrics,
    pub(super) expert_tokens: Vec<Vec<u64>>,
    pub(super) gradients: Tensors,
    pub(super) grad_norm: f64,
}

pub(super) fn oracle(subject: &Subject) -> Subject {
    subject.other(Arc::new(ReferenceBackend::new()))
}

impl<'a> Setting<'a> {
    pub(super) fn new(model: &'a ModelSpec, seed: u64) -> Result<Self> {
        Ok(Self {
            model,
            weights: crate::fixture::weights(model, seed)?,
        })
    }

    /// One step from the first weights; gradients are empty where the backend does not export them.
    pub(super) fn step(
        &self,
        subject: &Subject,
        batch: &Batch,
        objective: &dyn Objective,
        layout: Layout,
    ) -> Result<Step> {
        let mut global = batch.clone();
        let mut totals = BatchTotals::count(&global);
        objective.prepare(&mut global, &mut totals)?;
        let mut job = subject.job(self.model);
        layout.lay_out(&mut job);
        let exports = subject.backend.capability().export_gradients;
        let steps = subject.run_from(&job, &self.weights, |rank| {
            let share = rank.share(&global, layout.limit)?;
            let report = rank.engine.forward_backward(&share, objective, &totals)?;
            let gradients = if exports {
                gradients(&mut rank.engine)?
            } else {
                Tensors::new()
            };
            let step = rank.engine.optim_step(&StepOptions::default())?;
            Ok(Step {
                loss: report.loss,
                metrics: report.metrics,
                expert_tokens: report.expert_tokens,
                gradients,
                grad_norm: step.grad_norm,
            })
        })?;
        Ok(steps.into_iter().next().expect("at least one rank"))
    }

    /// Scores from the first weights, on one rank.
    pub(super) fn score(
        &self,
        subject: &Subject,
        batch: &Batch,
        request: &ScoreRequest,
    ) -> Result<TokenOutputs> {
        let job = subject.job(self.model);
        let outputs = subject.run_from(&job, &self.weights, |rank| {
            rank.engine.forward(batch, request)
        })?;
        Ok(outputs.into_iter().next().expect("at least one rank"))
    }

    /// Whether no choice of experts is so near to another that rounding could make it otherwise.
    pub(super) fn is_far_from_ties(&self, subject: &Subject, batch: &Batch) -> Result<bool> {
        if self.model.moe.is_none() {
            return Ok(true);
        }
        let (exact, layout) = (oracle(subject), Layout::default());
        let step = self.step(&exact, batch, &Nll::default(), layout)?;
        let margin = step.metrics.value(ROUTER_MARGIN);
        let least = self.tolerances(subject, batch, 1.0)?.margin();
        Ok(margin.is_none_or(|margin| margin >= least))
    }

    /// Tolerances for this batch, at this temperature.
    pub(super) fn tolerances(
        &self,
        subject: &Subject,
        batch: &Batch,
        temperature: f64,
    ) -> Result<Tolerances> {
        let request = ScoreRequest {
            temperature,
            ..ScoreRequest::default()
        };
        let exact = self.score(&oracle(subject), batch, &request)?;
        let longest = batch.lengths().into_iter().max().unwrap_or(0);
        let magnitude = largest(&exact.log_probs);
        Ok(Tolerances::derived(
            self.model,
            subject.compute(),
            longest,
            magnitude,
        ))
    }

    /// A step beside the oracle's.
    pub(super) fn check_step(
        &self,
        subject: &Subject,
        findings: &mut Findings,
        batch: &Batch,
        objective: &dyn Objective,
        layout: Layout,
    ) -> Result<()> {
        let alone = Layout::default();
        self.check_step_beside(subject, findings, batch, objective, (layout, alone))
    }

    /// The same, with the oracle's micro-batches as its own layout cuts them.
    pub(super) fn check_step_beside(
        &self,
        subject: &Subject,
        findings: &mut Findings,
        batch: &Batch,
        objective: &dyn Objective,
        (layout, oracle_layout): (Layout, Layout),
    ) -> Result<()> {
        let temperature = objective.requires().temperature;
        let tolerances = self.tolerances(subject, batch, temperature)?;
        let watched = Watched::new(objective);
        let exact = self.step(&oracle(subject), batch, &watched, oracle_layout)?;
        tolerances.check_margin(&exact.metrics, findings);
        let (by_log_prob, by_entropy) = watched.slopes();
        let found = self.step(subject, batch, objective, layout)?;
        let loss = tolerances.log_prob * by_log_prob + tolerances.entropy * by_entropy;
        findings.number("loss", "", found.loss, exact.loss, loss);
        if !found.gradients.is_empty() {
            super::check_gradients(findings, &tolerances, &found.gradients, &exact.gradients);
        }
        if self.model.moe.is_some() {
            let same = found.expert_tokens == exact.expert_tokens;
            findings.fact("every expert got as many tokens as the oracle's", same);
        }
        for name in [LOAD_BALANCING_LOSS, ROUTER_Z_LOSS] {
            if let Some(exact) = exact.metrics.value(name) {
                let found = found.metrics.value(name).unwrap_or(f64::NAN);
                findings.number(name, "", found, exact, tolerances.router_loss(exact));
            }
        }
        let tolerance = tolerances.grad_norm(&exact.gradients);
        findings.number("grad_norm", "", found.grad_norm, exact.grad_norm, tolerance);
        Ok(())
    }

    /// Scores beside the oracle's.
    pub(super) fn check_scores(
        &self,
        subject: &Subject,
        findings: &mut Findings,
        batch: &Batch,
        request: &ScoreRequest,
    ) -> Result<()> {
        let tolerances = self.tolerances(subject, batch, request.temperature)?;
        let exact = self.score(&oracle(subject), batch, request)?;
        let found = self.score(subject, batch, request)?;
        let mut check = |what: &str, found: Option<&[f64]>, exact: Option<&[f64]>, tolerance| {
            if let Some(exact) = exact {
                let bound = Bound::Uniform(tolerance);
                findings.check(what, "", found.unwrap_or_default(), exact, bound);
            }
        };
        check(
            "log_probs",
            Some(&found.log_probs),
            Some(&exact.log_probs),
            tolerances.log_prob,
        );
        check(
            "entropy",
            found.entropy.as_deref(),
            exact.entropy.as_deref(),
            tolerances.entropy,
        );
        // Rare tokens have larger log-probs than the batch's own.
        let at = exact.log_probs_at.as_deref();
        let scale = at.map_or(1.0, |at| {
            largest(at).max(1.0) / largest(&exact.log_probs).max(1.0)
        });
        check(
            "log_probs_at",
            found.log_probs_at.as_deref(),
            at,
            tolerances.log_prob * scale.max(1.0),
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::{batches, model};

    /// By construction, not by a lucky seed: rounding moves a router's logits by less than a hundredth of this.
    #[test]
    fn fixtures_choose_experts_far_from_ties() {
        let subject = Subject::new(ReferenceBackend::new());
        let of = |name| (0..16).map(move |seed| (name, seed));
        for (name, seed) in ["mixtral", "q3_moe"].into_iter().flat_map(of) {
            let model = model(name);
            let setting = Setting::new(&model, seed).unwrap();
            let batch = batches::eight(model.vocab_size, seed).unwrap();
            let (nll, layout) = (Nll::default(), Layout::default());
            let step = setting.step(&subject, &batch, &nll, layout).unwrap();
            let margin = step.metrics.value(ROUTER_MARGIN).unwrap();
            assert!(margin > 0.02, "{name} of seed {seed}: {margin}");
        }
    }
}

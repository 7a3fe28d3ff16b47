//! The same training under any engine and layout, recorded.

use drivetrain_core::{
    Result,
    batch::{Batch, BatchTotals},
    config::OptimizerConfig,
    engine::{Engine, ScoreRequest, StepOptions, Weights},
    metrics::Metrics,
    model::ModelSpec,
    objective::Objective,
    weights::{MemoryWeights, WeightSource},
};

use crate::{
    suite::{Findings, Layout, Rank, Subject},
    tolerance::{StepRecord, Tensors},
};

/// What is trained, and how it is laid out.
#[derive(Debug, Clone, Copy)]
pub struct Training<'a> {
    /// The model.
    pub model: &'a ModelSpec,
    /// Its first weights.
    pub weights: &'a dyn WeightSource,
    /// A global batch for each step; at least one.
    pub batches: &'a [Batch],
    /// The loss.
    pub objective: &'a dyn Objective,
    /// AdamW.
    pub optimizer: OptimizerConfig,
    /// Over which ranks, in which micro-batches.
    pub layout: Layout,
}

/// What came of it.
#[derive(Debug, Clone, Default)]
pub struct Trace {
    /// Log-probs of the first batch under the first weights, in the batch's order, where they were scored.
    pub log_probs: Option<Vec<f64>>,
    /// Global loss of each step.
    pub losses: Vec<f64>,
    /// Gradient norm of each step.
    pub grad_norms: Vec<f64>,
    /// Each step as the weights' tolerances need it; empty gradients where the engine does not export them.
    pub steps: Vec<StepRecord>,
    /// Metrics of each step.
    pub metrics: Vec<Metrics>,
    /// Tokens that each expert got, in each step.
    pub expert_tokens: Vec<Vec<Vec<u64>>>,
    /// Weights at the end.
    pub weights: Tensors,
}

impl Training<'_> {
    /// Runs it. What ranks report alike is checked to be alike.
    ///
    /// # Errors
    /// The engine's.
    pub fn run(&self, subject: &Subject, findings: &mut Findings) -> Result<Trace> {
        let mut job = subject.job(self.model);
        job.config.optimizer = self.optimizer;
        self.layout.lay_out(&mut job);
        let traces = subject.run_from(&job, self.weights, |rank| {
            let request = ScoreRequest {
                temperature: self.objective.requires().temperature,
                ..ScoreRequest::default()
            };
            let scored = rank.score(&self.batches[0], self.layout.limit, &request)?;
            let mut trace = Trace {
                log_probs: Some(scored.log_probs),
                ..Trace::default()
            };
            for batch in self.batches {
                self.step(subject, rank, batch, &mut trace)?;
            }
            trace.weights = weights(&mut rank.engine, &Weights::Policy)?;
            Ok(trace)
        })?;
        let same = |other: &Trace| {
            other.log_probs == traces[0].log_probs
                && other.losses == traces[0].losses
                && other.grad_norms == traces[0].grad_norms
                && other.metrics == traces[0].metrics
                && other.expert_tokens == traces[0].expert_tokens
                && other.weights == traces[0].weights
        };
        findings.fact(
            "every rank reports the same log-probs, loss, grad_norm, metrics and weights",
            traces.iter().all(same),
        );
        Ok(traces.into_iter().next().unwrap_or_default())
    }

    fn step(
        &self,
        subject: &Subject,
        rank: &mut Rank,
        batch: &Batch,
        trace: &mut Trace,
    ) -> Result<()> {
        let mut global = batch.clone();
        let mut totals = BatchTotals::count(&global);
        self.objective.prepare(&mut global, &mut totals)?;
        let share = rank.share(&global, self.layout.limit)?;
        let report = rank
            .engine
            .forward_backward(&share, self.objective, &totals)?;
        let exports = subject.backend.capability().export_gradients;
        let gradients = if exports {
            gradients(&mut rank.engine)?
        } else {
            Tensors::new()
        };
        let step = rank.engine.optim_step(&StepOptions::default())?;
        trace.losses.push(report.loss);
        trace.metrics.push(report.metrics);
        trace.expert_tokens.push(report.expert_tokens);
        trace.grad_norms.push(step.grad_norm);
        trace.steps.push(StepRecord {
            gradients,
            clip_factor: step.clip_factor,
            learning_rate: step.learning_rate,
        });
        Ok(())
    }
}

/// The accumulated gradients.
///
/// # Errors
/// The engine's.
pub fn gradients(engine: &mut dyn Engine) -> Result<Tensors> {
    let mut sink = MemoryWeights::new();
    engine.export_gradients(&mut sink)?;
    Ok(tensors(&sink))
}

/// Some weights.
///
/// # Errors
/// The engine's.
pub fn weights(engine: &mut dyn Engine, which: &Weights) -> Result<Tensors> {
    let mut sink = MemoryWeights::new();
    engine.export_weights(which, &mut sink)?;
    Ok(tensors(&sink))
}

/// All values by name.
pub fn tensors(weights: &MemoryWeights) -> Tensors {
    let of = |(name, _, values): (&str, &[usize], &[f64])| (name.to_owned(), values.to_vec());
    weights.iter().map(of).collect()
}

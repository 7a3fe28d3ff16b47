//! What public projects got wrong on the axes of this engine, each row of the known failures with the right value.
//! Rows about memory are in `tests/memory.rs`; scratch that holds NaN (N18) is in `src/poisoned.rs`.

mod experts;
mod export;
mod head;
mod norms;
mod sequences;

use drivetrain_conformance::{
    fixture::{batches, weights},
    suite::{Layout, Subject},
    tolerance::Tensors,
    train,
};
use drivetrain_core::{
    Result,
    batch::{Batch, BatchTotals},
    config::{JobSpec, MoeConfig, ParallelConfig},
    engine::{Engine, OptimReport, ScoreRequest, StepOptions, Weights},
    metrics::Metrics,
    model::ModelSpec,
    objective::{Objective, ObjectiveValue, TokenOutputs},
    weights::MemoryWeights,
};
use drivetrain_megatron::Megatron;

const SEED: u64 = 7;

/// `-sum of weight * log p` over scored tokens: gradients in proportion to the weights.
#[derive(Debug, Clone)]
struct Linear {
    /// Of every token.
    scale: f64,
    /// By token id, beside `scale`; 1 where the list ends.
    by_id: Vec<f64>,
}

impl Linear {
    fn scaled(scale: f64) -> Self {
        let by_id = Vec::new();
        Self { scale, by_id }
    }
}

impl Objective for Linear {
    fn name(&self) -> &str {
        "linear"
    }

    fn evaluate(
        &self,
        microbatch: &Batch,
        outputs: &TokenOutputs,
        _: &BatchTotals,
    ) -> Result<ObjectiveValue> {
        let ids = microbatch.tokens().iter().zip(microbatch.scored());
        let weight = |(&id, scored): (&u32, bool)| match scored {
            true => -self.scale * self.by_id.get(id as usize).copied().unwrap_or(1.0),
            false => 0.0,
        };
        let d_log_probs: Vec<f64> = ids.map(weight).collect();
        let products = d_log_probs.iter().zip(&outputs.log_probs);
        Ok(ObjectiveValue {
            loss: products.map(|(d, l)| d * l).sum(),
            d_log_probs,
            ..ObjectiveValue::default()
        })
    }
}

/// One step, and what is asked of it under several layouts.
#[derive(Debug)]
struct Setting {
    model: ModelSpec,
    weights: MemoryWeights,
    batch: Batch,
    objective: Box<dyn Objective>,
    moe: MoeConfig,
}

/// What a rank learns of it.
#[derive(Debug)]
struct Found {
    /// Which data-parallel share it had.
    data_index: usize,
    /// Scores of that.
    log_probs: Vec<f64>,
    loss: f64,
    metrics: Metrics,
    expert_tokens: Vec<Vec<u64>>,
    gradients: Tensors,
    step: OptimReport,
    /// After the step.
    weights: Tensors,
}

impl Setting {
    /// A fixture's weights, sequences of (tokens, scored tokens), and a loss that is a plain sum.
    fn new(model: &ModelSpec, shape: &[(usize, usize)]) -> Self {
        Self {
            weights: weights(model, SEED).unwrap(),
            batch: batches::scored(shape, model.vocab_size, SEED).unwrap(),
            objective: Box::new(Linear::scaled(1.0)),
            moe: MoeConfig::default(),
            model: model.clone(),
        }
    }

    fn job(&self, layout: Layout) -> JobSpec {
        let subject = Subject::new(Megatron).with_moe(self.moe);
        let mut job = subject.job(&self.model);
        job.config.optimizer.learning_rate = 0.0;
        layout.lay_out(&mut job);
        job
    }

    /// What every rank finds.
    fn run(&self, layout: Layout) -> Vec<Found> {
        let job = self.job(layout);
        let totals = BatchTotals::count(&self.batch);
        let body = |rank: &mut drivetrain_conformance::suite::Rank| {
            let share = rank.share(&self.batch, layout.limit)?;
            let engine = &mut rank.engine;
            let scores = engine.forward(&share, &ScoreRequest::default())?;
            let report = engine.forward_backward(&share, &*self.objective, &totals)?;
            Ok(Found {
                data_index: rank.data_index,
                log_probs: scores.log_probs,
                loss: report.loss,
                metrics: report.metrics,
                expert_tokens: report.expert_tokens,
                gradients: train::gradients(engine)?,
                step: engine.optim_step(&StepOptions::default())?,
                weights: train::weights(engine, &Weights::Policy)?,
            })
        };
        let subject = Subject::new(Megatron);
        subject.run_from(&job, &self.weights, body).unwrap()
    }

    /// What the first rank finds.
    fn first(&self, layout: Layout) -> Found {
        self.run(layout).remove(0)
    }

    /// Replaces a tensor by a function of its elements.
    fn change(&mut self, name: &str, mut change: impl FnMut(usize, f64) -> f64) {
        let (shape, values) = self
            .weights
            .iter()
            .find(|(found, ..)| *found == name)
            .map(|(_, shape, values)| (shape.to_vec(), values.to_vec()))
            .unwrap();
        let changed = values.into_iter().enumerate();
        let changed = changed.map(|(i, v)| f64::from(change(i, v) as f32));
        let dtype = self.model.dtype;
        self.weights
            .insert(name, &shape, dtype, changed.collect())
            .unwrap();
    }
}

/// Scores of all data-parallel shares, one after the other.
fn joined(ranks: &[Found]) -> Vec<f64> {
    let mut all = Vec::new();
    let mut next = 0;
    for found in ranks {
        // Model-parallel peers score the same share.
        if found.data_index == next {
            next += 1;
            all.extend(&found.log_probs);
        }
    }
    all
}

/// A layout of ranks.
fn layout(change: impl FnOnce(&mut ParallelConfig)) -> Layout {
    let mut parallel = ParallelConfig::default();
    change(&mut parallel);
    Layout::parallel(parallel)
}

/// Tensor ranks, with or without sequence parallelism.
fn tensor(ranks: usize, sequence: bool) -> Layout {
    layout(|p| {
        p.tensor_parallel_size = ranks;
        p.sequence_parallel = sequence;
    })
}

fn squares(values: &[f64]) -> f64 {
    values.iter().map(|v| v * v).sum()
}

fn assert_near(what: &str, found: f64, expected: f64, tolerance: f64) {
    let gap = (found - expected).abs();
    assert!(
        gap <= tolerance,
        "{what}: {found}, expected {expected}, off by {gap:e}"
    );
}

/// Every element within `tolerance` of the largest of its tensor.
fn assert_close(what: &str, found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(0.0_f64, |m, v| m.max(v.abs()));
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert_near(&format!("{what}[{i}]"), *f, *e, tolerance * largest);
    }
}

/// The same of all tensors.
fn assert_all_close(what: &str, found: &Tensors, expected: &Tensors, tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (name, expected) in expected {
        assert_close(
            &format!("{what}: {name}"),
            &found[name],
            expected,
            tolerance,
        );
    }
}

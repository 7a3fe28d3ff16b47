//! The same job under several engines: same start, same batches; what each costs and whether they agree.

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use drivetrain_conformance::{
    tolerance::{StepRecord, Tensors},
    train::{gradients, weights},
};
use drivetrain_core::{
    DType, Result,
    batch::{Batch, BatchTotals},
    config::{JobSpec, LoadedJob},
    engine::{Backend, Engine, ScoreRequest, StepOptions, WeightInit, Weights, build_engine},
    launch::run_ranks,
    metrics::{peak_resident_bytes, process_cpu_seconds, reset_peak_resident},
    objective::{self, Objective},
    plan::{MicrobatchLimit, plan_microbatches},
    trainer::BatchSource,
    weights::WeightSource,
};
use drivetrain_data::{Dataset, DatasetOptions};
use serde::Serialize;

use super::{
    parity::{PARITY_STEPS, Parity, judge},
    scores::global_scores,
    timeout, total_threads,
    train::first_weights,
};

/// What to compare.
#[derive(Debug)]
pub struct CompareOptions {
    /// Optimizer steps of each engine.
    pub steps: u64,
}

/// One engine's run.
#[derive(Debug, Clone, Serialize)]
pub struct BackendRun {
    /// The backend.
    pub backend: String,
    /// Whether it stands for the exact value.
    pub exact: bool,
    /// Dtype it computed in.
    pub compute: DType,
    /// Ranks it ran on.
    pub ranks: usize,
    /// Global loss of each step.
    pub losses: Vec<f64>,
    /// Gradient norm of each step.
    pub grad_norms: Vec<f64>,
    /// Wall seconds of each step.
    pub seconds: Vec<f64>,
    /// Median wall seconds of a step, the first left out where there are others.
    pub step_seconds: f64,
    /// Median CPU seconds of a step, all ranks, likewise.
    pub cpu_seconds: f64,
    /// Tokens a second over all ranks, at the median step.
    pub tokens_per_second: f64,
    /// GEMM rate of its ranks' threads, measured before the run, FLOP/s.
    pub peak_flops: f64,
    /// Model FLOP/s over that rate, at the median step.
    pub mfu: f64,
    /// Peak resident bytes of the process during the run over those before it, where the system tells.
    pub peak_memory: Option<u64>,
    /// What parity is judged by.
    #[serde(skip)]
    pub(super) evidence: Evidence,
}

/// What parity is judged by.
#[derive(Debug, Clone, Default)]
pub(super) struct Evidence {
    /// Log-probs of the first batch under the first weights, `[T]`.
    pub log_probs: Vec<f64>,
    /// The first steps, with their gradients.
    pub steps: Vec<StepRecord>,
    /// Weights before and after the first steps.
    pub start: Tensors,
    pub weights: Tensors,
}

/// All runs and the verdict.
#[derive(Debug, Clone, Serialize)]
pub struct CompareReport {
    /// Tokens of a step (of the first batch).
    pub tokens: usize,
    /// Parameters of the model.
    pub parameters: usize,
    /// A run a backend, in the order asked for.
    pub runs: Vec<BackendRun>,
    /// Every run against the one that is held for true: the exact one where it ran, else the first.
    pub parity: Vec<Parity>,
}

impl CompareReport {
    /// Whether every comparison is within its tolerance.
    pub fn agrees(&self) -> bool {
        !self.parity.is_empty() && self.parity.iter().all(Parity::agrees)
    }
}

/// Runs `job` under each of these backends, one after the other.
///
/// # Errors
/// Those of data, files, engines and ranks. A disagreement is no error here: see
/// [`CompareReport::agrees`].
pub fn compare(
    jobs: &[(LoadedJob, Arc<dyn Backend>)],
    options: &CompareOptions,
    progress: &(dyn Fn(&str, u64, f64) + Sync),
) -> Result<CompareReport> {
    let (job, _) = &jobs[0];
    let spec = &job.spec;
    let dataset = Dataset::open(
        &spec.config.data.train,
        &DatasetOptions::of_job(spec, &job.model_folder),
    )?;
    let dataset = Arc::new(dataset);
    let mut source = dataset.batches(spec.config.batch.global_batch_size, spec.config.seed)?;
    let batches: Vec<Batch> = (0..options.steps)
        .map(|_| source.next_batch())
        .collect::<Result<_>>()?;
    let start = first_weights(job)?;
    let mut peaks = BTreeMap::new();
    let mut runs = Vec::new();
    for (job, backend) in jobs {
        let mut spec = job.spec.clone();
        // Masters are compared, not what an export would round them to.
        spec.config.precision.export = Some(match spec.config.precision.compute {
            DType::F64 => DType::F64,
            _ => DType::F32,
        });
        let threads = total_threads(&spec.config, spec.mesh()?.world_size());
        let peak = *peaks
            .entry(threads)
            .or_insert_with(|| drivetrain_kernels::measure_peak_flops(threads));
        runs.push(run(&spec, &**backend, &*start, &batches, peak, progress)?);
    }
    let parity = judge(&spec.model, &spec.config.optimizer, &batches[0], &runs);
    Ok(CompareReport {
        tokens: batches[0].num_tokens(),
        parameters: spec.model.num_parameters(),
        runs,
        parity,
    })
}

fn run(
    spec: &JobSpec,
    backend: &dyn Backend,
    start: &dyn WeightSource,
    batches: &[Batch],
    peak_flops: f64,
    progress: &(dyn Fn(&str, u64, f64) + Sync),
) -> Result<BackendRun> {
    let mesh = spec.mesh()?;
    let ranks = mesh.world_size();
    let objective = objective::from_config(&spec.config.objective)?;
    reset_peak_resident();
    let before = peak_resident_bytes();
    let results = run_ranks(ranks, timeout(&spec.config), |world| {
        let (mut engine, _) =
            build_engine(backend, spec, world.clone(), WeightInit::Source(start))?;
        let limit = MicrobatchLimit::from_config(&spec.config.batch);
        let plan = |b: &Batch| plan_microbatches(&b.lengths(), b.groups(), mesh.data_size(), limit);
        let request = ScoreRequest {
            temperature: objective.requires().temperature,
            ..ScoreRequest::default()
        };
        let first = &batches[0];
        let mut evidence = Evidence {
            log_probs: global_scores(&mut engine, first, &plan(first)?, &mesh, &*world, &request)?
                .0,
            start: weights(&mut engine, &Weights::Policy)?,
            ..Evidence::default()
        };
        let mut out = Vec::new();
        for (n, batch) in batches.iter().enumerate() {
            world.barrier()?;
            let (cpu, began) = (process_cpu_seconds(), Instant::now());
            let mut global = batch.clone();
            let mut totals = BatchTotals::count(&global);
            objective.prepare(&mut global, &mut totals)?;
            let share = plan(&global)?.share(&global, mesh.data_index(world.rank()))?;
            let report = engine.forward_backward(&share, &objective, &totals)?;
            let computed = began.elapsed();
            // Looking at the gradients is not part of the step.
            let seen = (n < PARITY_STEPS)
                .then(|| gradients(&mut engine))
                .transpose()?;
            let resumed = Instant::now();
            let optim = engine.optim_step(&StepOptions::default())?;
            world.barrier()?;
            let seconds = (computed + resumed.elapsed()).as_secs_f64();
            out.push((
                report.loss,
                optim.grad_norm,
                seconds,
                process_cpu_seconds() - cpu,
            ));
            if let Some(gradients) = seen {
                evidence.steps.push(StepRecord {
                    gradients,
                    clip_factor: optim.clip_factor,
                    learning_rate: optim.learning_rate,
                });
                evidence.weights = weights(&mut engine, &Weights::Policy)?;
            }
            if world.rank() == 0 {
                progress(backend.name(), n as u64 + 1, report.loss);
            }
        }
        Ok((out, evidence))
    })?;
    let peak_memory = peak_resident_bytes()
        .zip(before)
        .map(|(peak, start)| peak.saturating_sub(start));
    let (steps, evidence) = results.into_iter().next().unwrap_or_default();
    // The steps whose gradients were looked at cost more CPU than a step does.
    let clean = if steps.len() > PARITY_STEPS + 1 {
        &steps[PARITY_STEPS..]
    } else {
        &steps[..]
    };
    let step_seconds = median(clean.iter().map(|s| s.2));
    let flops = spec.model.train_flops(&batches[0].lengths());
    Ok(BackendRun {
        backend: backend.name().to_owned(),
        exact: backend.is_exact(),
        compute: spec.config.precision.compute,
        ranks,
        losses: steps.iter().map(|s| s.0).collect(),
        grad_norms: steps.iter().map(|s| s.1).collect(),
        seconds: steps.iter().map(|s| s.2).collect(),
        step_seconds,
        cpu_seconds: median(clean.iter().map(|s| s.3)),
        tokens_per_second: batches[0].num_tokens() as f64 / step_seconds,
        peak_flops,
        mfu: flops / step_seconds / peak_flops,
        peak_memory,
        evidence,
    })
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

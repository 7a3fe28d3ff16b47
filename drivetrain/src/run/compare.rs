//! The same job under several engines: same start, same batches; what each costs and whether they agree.

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use drivetrain_core::{
    DType, Error, ErrorKind, Result,
    batch::{Batch, BatchTotals},
    communicator::Communicator,
    config::{JobSpec, LoadBalancing, LoadedJob},
    engine::{Backend, Engine, Guarded, ScoreRequest, StepOptions, WeightInit, build_engine},
    launch::run_ranks,
    metrics::{peak_resident_bytes, process_cpu_seconds, reset_peak_resident},
    moe::RouterLosses,
    objective::{self, Objective},
    plan::{MicrobatchLimit, MicrobatchPlan, TrainPlan},
    trainer::{BatchSource, complete},
    weights::WeightSource,
};
use serde::Serialize;

use super::{
    evidence::{Evidence, Kept, StepEvidence},
    open_training_data,
    parity::{PARITY_STEPS, Parity, Truth},
    timeout, total_threads,
    train::{first_weights, keep_reference},
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
    /// Dtype in which it kept activations for backward, if another.
    pub saved_activations: Option<DType>,
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
    /// Peak resident bytes of the process during the run, where the system tells: what it held before, such as the
    /// files of weights and the libraries, counts.
    pub peak_memory: Option<u64>,
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

/// A load that is balanced over micro-batches depends on how the batch is cut into them, by the number of data-parallel
/// ranks too; engines that cut differently have different losses, both right.
fn check_cut(jobs: &[(LoadedJob, Arc<dyn Backend>)]) -> Result<()> {
    let mut cuts = BTreeMap::new();
    for (job, backend) in jobs {
        let (config, model) = (&job.spec.config, &job.spec.model);
        let limits = (
            config.batch.micro_batch_size,
            config.batch.micro_batch_tokens,
        );
        let global = RouterLosses::new(config, model).balancing == Some(LoadBalancing::Global);
        if global && limits != (None, None) {
            cuts.insert(job.spec.mesh()?.data_size(), backend.name().to_owned());
        }
    }
    if cuts.len() < 2 {
        return Ok(());
    }
    let found = cuts
        .iter()
        .map(|(ranks, name)| format!("{name} over {ranks} data-parallel ranks"));
    let message = "the load of experts is balanced over micro-batches, and these engines cut the batch differently";
    Err(Error::new(ErrorKind::Config, "compare", message)
        .with("path", "moe.load_balancing")
        .with("found", found.collect::<Vec<_>>().join(", "))
        .help(
            "compare with `moe.load_balancing: sequence`, without `batch.micro_batch_size` and \
             `batch.micro_batch_tokens`, or over one rank",
        ))
}

/// Runs `job` under each of these backends, one after the other: once to see what it costs, and once more, a few
/// steps, to see whether it agrees. Of the one held for true, log-probs, gradients of [`PARITY_STEPS`] steps and
/// weights stay in memory; of each other, until it is judged, one gradient and the weights.
///
/// # Errors
/// Those of data, files, engines and ranks; `Parity` for an engine whose second run is not its first. A disagreement
/// is no error here: see [`CompareReport::agrees`].
pub fn compare(
    jobs: &[(LoadedJob, Arc<dyn Backend>)],
    options: &CompareOptions,
    progress: &(dyn Fn(&str, u64, f64) + Sync),
) -> Result<CompareReport> {
    let (job, _) = &jobs[0];
    let spec = &job.spec;
    check_cut(jobs)?;
    let objective = objective::from_config(&spec.config.objective)?;
    let dataset = open_training_data(job, &objective)?;
    let mut source = dataset.batches(spec.config.batch.global_batch_size, spec.config.seed)?;
    let batches: Vec<Batch> = (0..options.steps)
        .map(|_| source.next_batch())
        .collect::<Result<_>>()?;
    let start = first_weights(job)?;
    let mut peaks = BTreeMap::new();
    let mut runs = BTreeMap::new();
    let mut parity = BTreeMap::new();
    let mut truth: Option<Truth<'_>> = None;
    // The one held for true is first to run, so that the others can be judged as they come.
    let true_one = jobs.iter().position(|(_, b)| b.is_exact()).unwrap_or(0);
    let others = (0..jobs.len()).filter(|&n| n != true_one);
    for n in std::iter::once(true_one).chain(others) {
        let (job, backend) = &jobs[n];
        let mut spec = job.spec.clone();
        // Masters are compared, not what an export would round them to.
        spec.config.precision.export = Some(match spec.config.precision.compute {
            DType::F64 => DType::F64,
            _ => DType::F32,
        });
        let threads = total_threads(&spec.config, spec.mesh()?.world_size());
        let subject = Subject {
            spec: &spec,
            backend: &**backend,
            start: &*start,
            objective: &objective,
        };
        let peak = *peaks
            .entry(threads)
            .or_insert_with(|| drivetrain_kernels::measure_peak_flops(threads));
        let run = subject.measure(&batches, peak, progress)?;
        if jobs.len() > 1 {
            let steps = &batches[..batches.len().min(PARITY_STEPS)];
            // A gradient is compared once; those of the true one also bound the weights.
            let gradients = if truth.is_none() { steps.len() } else { 1 };
            let evidence = subject.observe(steps, gradients)?;
            subject.repeats(&run, &evidence)?;
            match &truth {
                None => {
                    truth = Some(Truth {
                        model: &jobs[0].0.spec.model,
                        optimizer: &jobs[0].0.spec.config.optimizer,
                        start: &*start,
                        longest: batches[0].lengths().into_iter().max().unwrap_or(0),
                        run: run.clone(),
                        evidence,
                    });
                }
                Some(truth) => {
                    parity.insert(n, truth.judge(&run, &evidence)?);
                }
            }
        }
        runs.insert(n, run);
    }
    Ok(CompareReport {
        tokens: batches[0].num_tokens(),
        parameters: spec.model.num_parameters(),
        runs: runs.into_values().collect(),
        parity: parity.into_values().collect(),
    })
}

/// A job under one engine.
struct Subject<'a> {
    spec: &'a JobSpec,
    backend: &'a dyn Backend,
    start: &'a dyn WeightSource,
    objective: &'a dyn Objective,
}

/// One rank of it.
struct Rank<'a> {
    subject: &'a Subject<'a>,
    engine: Guarded,
    plan: TrainPlan,
    world: Arc<dyn Communicator>,
}

impl Subject<'_> {
    fn rank(&self, world: &Arc<dyn Communicator>) -> Result<Rank<'_>> {
        let init = WeightInit::Source(self.start);
        let (mut engine, plan) = build_engine(self.backend, self.spec, world.clone(), init)?;
        keep_reference(&mut engine, self.objective, self.start)?;
        Ok(Rank {
            subject: self,
            engine,
            plan,
            world: world.clone(),
        })
    }

    /// What a step costs, with nothing kept.
    fn measure(
        &self,
        batches: &[Batch],
        peak_flops: f64,
        progress: &(dyn Fn(&str, u64, f64) + Sync),
    ) -> Result<BackendRun> {
        let (spec, backend) = (self.spec, self.backend);
        let ranks = spec.mesh()?.world_size();
        reset_peak_resident();
        let results = run_ranks(ranks, timeout(&spec.config), |world| {
            let mut rank = self.rank(&world)?;
            let mut out = Vec::new();
            for (n, batch) in batches.iter().enumerate() {
                world.barrier()?;
                let (cpu, began) = (process_cpu_seconds(), Instant::now());
                let loss = rank.forward_backward(batch)?;
                let optim = rank.engine.optim_step(&StepOptions::default())?;
                world.barrier()?;
                let seconds = began.elapsed().as_secs_f64();
                out.push((loss, optim.grad_norm, seconds, process_cpu_seconds() - cpu));
                if world.rank() == 0 {
                    progress(backend.name(), n as u64 + 1, loss);
                }
            }
            Ok(out)
        })?;
        let peak_memory = peak_resident_bytes();
        let steps = results.into_iter().next().unwrap_or_default();
        let warm = &steps[usize::from(steps.len() > 1)..];
        let step_seconds = median(warm.iter().map(|s| s.2));
        let flops = spec.model.train_flops(&batches[0].lengths());
        Ok(BackendRun {
            backend: backend.name().to_owned(),
            exact: backend.is_exact(),
            compute: spec.config.precision.compute,
            saved_activations: spec.config.precision.saved_activations,
            ranks,
            losses: steps.iter().map(|s| s.0).collect(),
            grad_norms: steps.iter().map(|s| s.1).collect(),
            seconds: steps.iter().map(|s| s.2).collect(),
            step_seconds,
            cpu_seconds: median(warm.iter().map(|s| s.3)),
            tokens_per_second: batches[0].num_tokens() as f64 / step_seconds,
            peak_flops,
            mfu: flops / step_seconds / peak_flops,
            peak_memory,
        })
    }

    /// The same first steps again, looked at; the gradients of the first so many.
    fn observe(&self, batches: &[Batch], gradients: usize) -> Result<Evidence> {
        let config = &self.spec.config;
        let compute = config.precision.compute;
        let ranks = self.spec.mesh()?.world_size();
        let results = run_ranks(ranks, timeout(config), |world| {
            let mut rank = self.rank(&world)?;
            let mut evidence = Evidence {
                log_probs: rank.log_probs(&batches[0])?,
                ..Evidence::default()
            };
            for (n, batch) in batches.iter().enumerate() {
                evidence.losses.push(rank.forward_backward(batch)?);
                let gradients = match n < gradients {
                    true => Kept::gradients(&mut rank.engine, &*world, compute)?,
                    false => Kept::default(),
                };
                let optim = rank.engine.optim_step(&StepOptions::default())?;
                evidence.steps.push(StepEvidence {
                    gradients,
                    clip_factor: optim.clip_factor,
                    learning_rate: optim.learning_rate,
                });
            }
            evidence.weights = Kept::weights(&mut rank.engine, &*world, compute)?;
            Ok(evidence)
        })?;
        Ok(results.into_iter().next().unwrap_or_default())
    }

    /// What was looked at is what was measured.
    fn repeats(&self, run: &BackendRun, evidence: &Evidence) -> Result<()> {
        let measured = &run.losses[..evidence.losses.len()];
        if measured == evidence.losses {
            return Ok(());
        }
        let message = "the engine does not repeat its own losses";
        Err(Error::new(ErrorKind::Parity, "compare", message)
            .with("backend", self.backend.name())
            .with("expected", format!("{measured:?}"))
            .with("found", format!("{:?}", evidence.losses)))
    }
}

impl Rank<'_> {
    fn cut(&self, batch: &Batch) -> Result<MicrobatchPlan> {
        let limit = MicrobatchLimit::from_config(&self.subject.spec.config.batch);
        self.plan.cut(batch, limit)
    }

    /// The first half of a step as the trainer makes it; the global loss.
    fn forward_backward(&mut self, batch: &Batch) -> Result<f64> {
        let objective = self.subject.objective;
        let mut global = batch.clone();
        let mut totals = BatchTotals::count(&global);
        objective.prepare(&mut global, &mut totals)?;
        let index = self.plan.mesh.data_index(self.world.rank());
        let mut share = self.cut(&global)?.share(&global, index)?;
        complete(&mut share, &mut self.engine, objective)?;
        let report = self.engine.forward_backward(&share, objective, &totals)?;
        Ok(report.loss)
    }

    fn log_probs(&mut self, batch: &Batch) -> Result<Vec<f64>> {
        let request = ScoreRequest {
            temperature: self.subject.objective.requires().temperature,
            ..ScoreRequest::default()
        };
        let (cut, mesh) = (self.cut(batch)?, &self.plan.mesh);
        let share = cut.share(batch, mesh.data_index(self.world.rank()))?;
        let own = self.engine.forward(&share, &request)?;
        Ok(cut.gather(batch, &own, mesh, &*self.world)?.log_probs)
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

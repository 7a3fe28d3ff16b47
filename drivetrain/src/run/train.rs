//! A training run: ranks, checkpoints, metrics, the trained model.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicBool, Ordering},
};

use drivetrain_core::{
    Error, ErrorKind, Result,
    batch::Batch,
    checkpoint::{Checkpoint, CheckpointStore, Identity},
    communicator::{Communicator, Intercepted, Traced},
    config::{CHECKPOINTS, LoadedJob, MODEL},
    engine::{Backend, Engine, WeightInit, Weights, build_engine},
    hf::{HfFolder, HfWriter, HfWriterOptions},
    launch::Ranks,
    metrics::{EventWriter, JsonRecord, JsonlWriter, scalars},
    objective::{self, BuiltinObjective, Objective},
    trainer::{Observer, Outcome, REFERENCE, StepRecord, Trainer},
    weights::{DiscardingSink, SeededWeights, WeightSource},
};

use drivetrain_data::Dataset;
use serde_json::{Map, Value};

use super::{open_data, open_training_data, output::OutputFolder, timeout, total_threads};
use crate::trace::Trace;

/// How to run.
#[derive(Debug, Default)]
pub struct TrainOptions {
    /// Continue from the newest checkpoint of the job's output.
    pub resume: bool,
    /// Start anew where the output holds another run, which is lost.
    pub overwrite: bool,
    /// Set from outside to save and stop.
    pub stop: AtomicBool,
    /// What listens to the run, as a layer of the process's `tracing` subscriber; written to [`TRACE`] at its end,
    /// whatever that is.
    pub trace: Option<Arc<Trace>>,
    /// Where the ranks are.
    pub ranks: Ranks,
}

/// File under a job's output: the timeline of the steps that were asked for. Ranks in processes have one each, which
/// are named after them but for rank 0's.
pub const TRACE: &str = "trace.json";

/// How a run ended.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct TrainSummary {
    /// Committed steps.
    pub step: u64,
    /// Those of them that the run went on from.
    pub first_step: u64,
    /// Whether it was stopped before the last.
    pub stopped: bool,
    /// Loss of the last step, where one was made.
    pub last_loss: Option<f64>,
    /// Sequences left out and cut for their length.
    pub skipped_sequences: usize,
    /// Sequences cut at the limit.
    pub truncated_sequences: usize,
}

/// Runs a job: trains, writes metrics and checkpoints, and at the end the model as a Hugging Face folder.
///
/// Nothing is written before data, weights and the place of the model were found sound. If the model cannot be
/// written at the end, a checkpoint is.
///
/// # Errors
/// Those of config, data, files, engine and ranks, each with its place.
pub fn train(
    job: &LoadedJob,
    backend: &dyn Backend,
    options: &TrainOptions,
    observer: &mut (dyn Observer + Send),
) -> Result<TrainSummary> {
    let spec = &job.spec;
    let ranks = &options.ranks;
    let prepared = ranks.is_first().then(|| prepare(job, options));
    let prepared = ranks.agree("prepare_output", prepared.transpose())?;
    // Counted from 1: 0 is no checkpoint.
    let start = prepared.as_ref().and_then(|(_, start)| *start);
    let start = ranks.from_first(start.map_or(0, |step| step + 1))?;
    let start = start.checked_sub(1);
    let output = prepared.map(|(output, _)| output);
    let store = CheckpointStore::new(spec.config.output.join(CHECKPOINTS));
    let Inputs {
        objective,
        dataset,
        identity,
        resumed,
        first,
        validation,
    } = ranks.agree("open_inputs", Inputs::open(job, backend, &store, start))?;
    let num_ranks = spec.mesh()?.world_size();
    let peak = drivetrain_kernels::measure_peak_flops(match ranks {
        Ranks::Threads => total_threads(&spec.config, num_ranks),
        Ranks::Process(_) => spec.config.parallel.threads(num_ranks),
    });
    let observer = Mutex::new(observer);

    let outcomes = ranks.run(num_ranks, timeout(&spec.config), |world| {
        let world: Arc<dyn Communicator> = match &options.trace {
            Some(_) => Arc::new(Intercepted::new(world, Arc::new(Traced))),
            None => world,
        };
        let init = if resumed.is_some() {
            WeightInit::Deferred
        } else {
            WeightInit::Source(&*first)
        };
        let (mut engine, plan) = build_engine(backend, spec, world.clone(), init)?;
        keep_reference(&mut engine, &objective, &*first)?;
        let data = dataset.batches(spec.config.batch.global_batch_size, spec.config.seed)?;
        let stop = &options.stop;
        let mut trainer = Trainer::new(
            spec,
            engine,
            &plan,
            &objective,
            Box::new(data),
            world.clone(),
            stop,
        )?;
        trainer.validation = validation.clone();
        trainer.checkpoints = Some((store.clone(), identity.clone()));
        trainer.peak_flops = Some(match ranks {
            Ranks::Threads => peak,
            Ranks::Process(world) => {
                let mut all = [peak];
                world.sum_f64(&mut all)?;
                all[0]
            }
        });
        if let Some(checkpoint) = &resumed {
            trainer.resume(checkpoint)?;
        }
        let Some(output) = output.as_ref().filter(|_| world.rank() == 0) else {
            let outcome = run(job, &mut trainer, &*world, &mut ())?;
            return Ok((outcome, None));
        };
        let mut shared = observer.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = start.map(|_| trainer.kept());
        let mut tee = Tee {
            metrics: output.begin(spec, kept)?,
            events: output.begin_events(spec, kept)?,
            last_loss: None,
            observer: &mut **shared,
        };
        let outcome = run(job, &mut trainer, &*world, &mut tee)?;
        Ok((outcome, tee.last_loss))
    });
    if let Some(trace) = &options.trace {
        let file = match ranks {
            Ranks::Process(world) if !ranks.is_first() => format!("rank-{}-{TRACE}", world.rank()),
            _ => TRACE.to_owned(),
        };
        let written = trace.write(&spec.config.output.join(file));
        // The run's own failure comes first.
        if outcomes.is_ok() {
            written?;
        }
    }
    let outcomes = outcomes?;

    if let Some(path) = output
        .map(|output| output.metrics())
        .filter(|path| !path.exists())
    {
        tracing::warn!("{}: was removed during the run", path.display());
    }
    let (outcome, last_loss) = outcomes[0];
    let (step, stopped) = match outcome {
        Outcome::Finished { step } => (step, false),
        Outcome::Stopped { step } => (step, true),
    };
    Ok(TrainSummary {
        step,
        first_step: start.unwrap_or(0),
        stopped,
        last_loss,
        skipped_sequences: dataset.skipped(),
        truncated_sequences: dataset.truncated(),
    })
}

/// The output folder, held, and the step to go on from; what the run will write can be written.
fn prepare(job: &LoadedJob, options: &TrainOptions) -> Result<(OutputFolder, Option<u64>)> {
    let spec = &job.spec;
    let output = OutputFolder::hold(&spec.config.output)?;
    let start = output.step_to_resume(options)?;
    match start {
        Some(step) if step > spec.config.steps => {
            return Err(past_the_end(step, spec.config.steps));
        }
        _ => {}
    }
    output.check_space(spec)?;
    drop(model_writer(job)?);
    Ok((output, start))
}

/// What every process of a run reads.
struct Inputs {
    objective: BuiltinObjective,
    dataset: Arc<Dataset>,
    identity: Identity,
    resumed: Option<Checkpoint>,
    first: Box<dyn WeightSource>,
    validation: Option<Batch>,
}

impl Inputs {
    fn open(
        job: &LoadedJob,
        backend: &dyn Backend,
        store: &CheckpointStore,
        start: Option<u64>,
    ) -> Result<Self> {
        let spec = &job.spec;
        let objective = objective::from_config(&spec.config.objective)?;
        let dataset = open_training_data(job, &objective)?;
        let identity = Identity::new(&spec.model, dataset.identity()).written_by(backend.name());
        let resumed = start
            .map(|step| store.open_for(step, &identity))
            .transpose()?;
        let validation = match (&spec.config.data.validation, spec.config.validation.every) {
            (Some(path), Some(_)) => {
                Some(open_data(job, path)?.all(spec.config.validation.max_sequences)?)
            }
            _ => None,
        };
        Ok(Self {
            first: first_weights(job)?,
            objective,
            dataset,
            identity,
            resumed,
            validation,
        })
    }
}

/// Trains, and writes the model; if that fails, a checkpoint.
fn run(
    job: &LoadedJob,
    trainer: &mut Trainer<'_>,
    world: &dyn Communicator,
    observer: &mut dyn Observer,
) -> Result<Outcome> {
    let outcome = trainer.run(observer)?;
    let Outcome::Finished { step } = outcome else {
        return Ok(outcome);
    };
    export(job, &mut trainer.engine, world).map_err(|fault| match fault.kind() {
        // Nothing to go on from.
        ErrorKind::NonFinite => fault.with("step", step),
        _ => match trainer.save_once(observer) {
            Ok(()) => fault
                .with("step", step)
                .help("the run is saved as a checkpoint: mend the cause and add --resume"),
            Err(second) => fault.with("checkpoint", second),
        },
    })?;
    Ok(outcome)
}

/// Keeps the first weights as the reference policy, where the objective asks for its log-probs.
pub(super) fn keep_reference(
    engine: &mut dyn Engine,
    objective: &dyn Objective,
    first: &dyn WeightSource,
) -> Result<()> {
    let columns = objective.requires().columns;
    match columns.iter().any(|c| c == "reference_log_probs") {
        true => engine.import_weights(&Weights::Tag(REFERENCE.to_owned()), first),
        false => Ok(()),
    }
}

fn past_the_end(step: u64, steps: u64) -> Error {
    let message = "the checkpoint to resume from is past the job's last step";
    Error::new(ErrorKind::Config, "resume", message)
        .with("checkpoint", format!("step {step}"))
        .with("steps", steps)
        .help("raise `steps`, or `drivetrain export` the checkpoint")
}

impl TrainOptions {
    /// Asks for a save and a stop after the step in progress.
    pub fn ask_to_stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Where the first weights come from: the folder, or the seed.
pub(super) fn first_weights(job: &LoadedJob) -> Result<Box<dyn WeightSource>> {
    let spec = &job.spec;
    Ok(if spec.config.from_scratch {
        Box::new(SeededWeights::new(&spec.model, spec.config.seed))
    } else {
        Box::new(HfFolder::open(&job.model_folder, &spec.model)?)
    })
}

fn export(job: &LoadedJob, engine: &mut dyn Engine, world: &dyn Communicator) -> Result<()> {
    let opened = match world.rank() {
        0 => model_writer(job).map(Some),
        _ => Ok(None),
    };
    let exported = match world.agree("export_model", opened)? {
        Some(mut writer) => engine.export_weights(&Weights::Policy, &mut writer),
        None => engine.export_weights(&Weights::Policy, &mut DiscardingSink),
    };
    world.agree("export_model", exported)
}

/// The trained model's place, found writable.
fn model_writer(job: &LoadedJob) -> Result<HfWriter> {
    let spec = &job.spec;
    let options = HfWriterOptions {
        dtype: spec.config.precision.export,
        source_folder: Some(job.model_folder.clone()),
        finite: true,
        ..HfWriterOptions::default()
    };
    HfWriter::new(spec.config.output.join(MODEL), &spec.model, options)
}

/// Writes metrics.jsonl, then tells the caller's observer.
struct Tee<'a> {
    metrics: JsonlWriter,
    events: Option<EventWriter>,
    last_loss: Option<f64>,
    observer: &'a mut (dyn Observer + Send),
}

impl Tee<'_> {
    fn write(&mut self, record: &Map<String, Value>) -> Result<()> {
        self.metrics.write(record)?;
        let step = record.get("step").and_then(Value::as_u64);
        match (&mut self.events, step) {
            (Some(events), Some(step)) => events.scalars(step, scalars(record)),
            _ => Ok(()),
        }
    }
}

impl Observer for Tee<'_> {
    fn on_step(&mut self, record: &StepRecord) -> Result<()> {
        self.write(&record.to_json())?;
        self.last_loss = Some(record.loss);
        self.observer.on_step(record)
    }

    fn on_validation(&mut self, step: u64, loss: f64) -> Result<()> {
        let mut record = JsonRecord::default();
        record.value("step", step);
        record.number("validation_loss", loss);
        self.write(&record.finish())?;
        self.observer.on_validation(step, loss)
    }

    fn on_checkpoint(&mut self, step: u64) -> Result<()> {
        self.observer.on_checkpoint(step)
    }

    fn on_checkpoint_failed(&mut self, step: u64, error: &Error) -> Result<()> {
        let mut record = JsonRecord::default();
        record.value("step", step);
        record.value("checkpoint_failed", error.to_string());
        self.write(&record.finish())?;
        self.observer.on_checkpoint_failed(step, error)
    }

    fn on_checkpoint_skipped(&mut self, step: u64) -> Result<()> {
        self.observer.on_checkpoint_skipped(step)
    }
}

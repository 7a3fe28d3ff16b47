//! A training run: ranks, checkpoints, metrics, the trained model.

use std::{
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use drivetrain_core::{
    Error, ErrorKind, Result,
    checkpoint::{Checkpoint, CheckpointStore, Identity},
    communicator::Communicator,
    config::{JobSpec, LoadedJob},
    engine::{Backend, Engine, WeightInit, Weights, build_engine},
    hf::{HfFolder, HfWriter, HfWriterOptions},
    launch::run_ranks,
    metrics::{JsonRecord, JsonlWriter},
    objective::{self, Objective},
    trainer::{Observer, Outcome, REFERENCE, StepRecord, Trainer},
    weights::{DiscardingSink, SeededWeights, WeightSource},
};
use drivetrain_data::{Dataset, DatasetOptions};

use super::{timeout, total_threads};

/// Folder of checkpoints under a job's output.
pub const CHECKPOINTS: &str = "checkpoints";
/// File of metrics under a job's output, a JSON object a step.
pub const METRICS: &str = "metrics.jsonl";
/// Folder of the trained model under a job's output, in Hugging Face form.
pub const MODEL: &str = "model";

/// How to run.
#[derive(Debug, Default)]
pub struct TrainOptions {
    /// Continue from the newest checkpoint of the job's output.
    pub resume: bool,
    /// Set from outside to save and stop.
    pub stop: AtomicBool,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct TrainSummary {
    /// Committed steps.
    pub step: u64,
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
/// # Errors
/// Those of config, data, files, engine and ranks, each with its place.
pub fn train(
    job: &LoadedJob,
    backend: &dyn Backend,
    options: &TrainOptions,
    observer: &mut (dyn Observer + Send),
) -> Result<TrainSummary> {
    let spec = &job.spec;
    let output = &spec.config.output;
    let dataset = Arc::new(Dataset::open(
        &spec.config.data.train,
        &DatasetOptions::of_job(spec, &job.model_folder),
    )?);
    let identity = Identity::new(&spec.model, dataset.identity()).written_by(backend.name());
    let store = CheckpointStore::new(output.join(CHECKPOINTS));
    let resumed = checkpoint_to_resume(&store, &identity, output, options.resume)?;
    let start = resumed.as_ref().map_or(0, Checkpoint::step);
    prepare_output(spec, output)?;
    let files = Files {
        metrics: Mutex::new(JsonlWriter::open(&output.join(METRICS), start)?),
        last_loss: Mutex::new(None),
    };
    let first = first_weights(job)?;
    let objective = objective::from_config(&spec.config.objective)?;
    let validation = match &spec.config.data.validation {
        Some(path) => {
            let options = DatasetOptions::of_job(spec, &job.model_folder);
            let most = spec.config.validation.max_sequences;
            Some(Dataset::open(path, &options)?.all(most)?)
        }
        None => None,
    };
    let ranks = spec.mesh()?.world_size();
    let peak = drivetrain_kernels::measure_peak_flops(total_threads(&spec.config, ranks));
    let observer = Mutex::new(observer);

    let outcomes = run_ranks(ranks, timeout(&spec.config), |world| {
        let init = if resumed.is_some() {
            WeightInit::Deferred
        } else {
            WeightInit::Source(&*first)
        };
        let (mut engine, plan) = build_engine(backend, spec, world.clone(), init)?;
        if objective
            .requires()
            .columns
            .iter()
            .any(|c| c == "reference_log_probs")
        {
            engine.import_weights(&Weights::Tag(REFERENCE.to_owned()), &*first)?;
        }
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
        trainer.peak_flops = Some(peak);
        if let Some(checkpoint) = &resumed {
            trainer.resume(checkpoint)?;
        }
        let outcome = if world.rank() == 0 {
            let mut shared = observer.lock().unwrap_or_else(PoisonError::into_inner);
            let mut tee = Tee {
                files: &files,
                observer: &mut **shared,
            };
            trainer.run(&mut tee)?
        } else {
            trainer.run(&mut ())?
        };
        if let Outcome::Finished { .. } = outcome {
            export(job, &mut trainer.engine, &*world)?;
        }
        Ok(outcome)
    })?;

    let (step, stopped) = match outcomes[0] {
        Outcome::Finished { step } => (step, false),
        Outcome::Stopped { step } => (step, true),
    };
    let last_loss = *files
        .last_loss
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    Ok(TrainSummary {
        step,
        stopped,
        last_loss,
        skipped_sequences: dataset.skipped(),
        truncated_sequences: dataset.truncated(),
    })
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

/// The checkpoint to continue, if asked for. A run is never continued, nor its files replaced, unasked.
fn checkpoint_to_resume(
    store: &CheckpointStore,
    identity: &Identity,
    output: &Path,
    resume: bool,
) -> Result<Option<Checkpoint>> {
    match (store.latest()?, resume) {
        (Some(step), true) => store.open_for(step, identity).map(Some),
        (None, true) => Err(Error::new(
            ErrorKind::Checkpoint,
            "resume",
            "no complete checkpoint to resume from",
        )
        .with("folder", store.root().display())
        .help("leave --resume out to start anew, or point output: at the run to continue")),
        (None, false) if !output.join(METRICS).exists() => Ok(None),
        (found, false) => {
            let found = found.map_or("its metrics".to_owned(), |step| {
                format!("a checkpoint of step {step}")
            });
            Err(Error::new(
                ErrorKind::File,
                "start",
                "the output folder holds another run",
            )
            .with("folder", output.display())
            .with("found", found)
            .help("add --resume to continue it, or choose another output"))
        }
    }
}

fn prepare_output(spec: &JobSpec, output: &Path) -> Result<()> {
    let failed = |cause: std::io::Error| {
        Error::new(
            ErrorKind::File,
            "prepare_output",
            "cannot write to the output folder",
        )
        .with("folder", output.display())
        .caused_by(cause)
    };
    std::fs::create_dir_all(output).map_err(failed)?;
    std::fs::write(output.join("job.yaml"), spec.config.to_yaml()).map_err(failed)
}

fn export(job: &LoadedJob, engine: &mut dyn Engine, world: &dyn Communicator) -> Result<()> {
    if world.rank() != 0 {
        return engine.export_weights(&Weights::Policy, &mut DiscardingSink);
    }
    let spec = &job.spec;
    let options = HfWriterOptions {
        dtype: spec.config.precision.export,
        source_folder: Some(job.model_folder.clone()),
        ..HfWriterOptions::default()
    };
    let mut writer = HfWriter::new(spec.config.output.join(MODEL), &spec.model, options)?;
    engine.export_weights(&Weights::Policy, &mut writer)
}

#[derive(Debug)]
struct Files {
    metrics: Mutex<JsonlWriter>,
    last_loss: Mutex<Option<f64>>,
}

/// Writes metrics.jsonl, then tells the caller's observer.
struct Tee<'a> {
    files: &'a Files,
    observer: &'a mut (dyn Observer + Send),
}

impl Tee<'_> {
    fn write(&self, value: &impl serde::Serialize) -> Result<()> {
        self.files
            .metrics
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .write(value)
    }
}

impl Observer for Tee<'_> {
    fn on_step(&mut self, record: &StepRecord) -> Result<()> {
        self.write(record)?;
        *self
            .files
            .last_loss
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(record.loss);
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
}

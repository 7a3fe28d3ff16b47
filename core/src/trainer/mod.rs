//! The training loop, on one page. Every rank runs it, SPMD.

mod columns;
mod evaluate;
mod finite;
mod record;
mod saving;
mod source;

pub use columns::{REFERENCE, check_columns, complete};
pub use evaluate::mean_nll;
pub use record::{Observer, Outcome, RankMemory, StepRecord};
pub use source::{BatchSource, CyclicSource};

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use saving::Saves;

use crate::{
    Error, ErrorKind, Result,
    batch::{Batch, BatchTotals},
    checkpoint::{CheckpointStore, Identity, StateReader},
    communicator::{Communicator, ReduceOp},
    config::JobSpec,
    engine::{Engine, Guarded, StepOptions},
    mesh::MeshAxis,
    metrics::Kept,
    objective::Objective,
    plan::{MicrobatchLimit, MicrobatchPlan, TrainPlan},
    trace,
};

/// Skipped steps in a row after which training ends: the weights or the data are broken.
const MAX_SKIPPED: u32 = 16;

/// Name of the checkpoint blob that holds the data's position.
const DATA_BLOB: &str = "data";

/// Name of the checkpoint blob that holds the number of attempts at a step.
const ATTEMPTS_BLOB: &str = "attempts";

/// Name of the checkpoint blob that says how the ranks that wrote it were arranged: for information, since any layout
/// reads it.
pub const LAYOUT_BLOB: &str = "layout";

/// One rank's training run.
#[derive(Debug)]
pub struct Trainer<'a> {
    /// The job.
    pub job: &'a JobSpec,
    /// This rank's engine.
    pub engine: Guarded,
    /// The loss.
    pub objective: &'a dyn Objective,
    /// Global batches, the same on every rank.
    pub data: Box<dyn BatchSource>,
    /// Sequences of the validation pass.
    pub validation: Option<Batch>,
    /// Where checkpoints go, and what they say of themselves.
    pub checkpoints: Option<(CheckpointStore, Identity)>,
    /// FLOP/s that all ranks could reach together; MFU is reported where it is known.
    pub peak_flops: Option<f64>,
    /// Set from outside (Ctrl-C) to save and stop after the step in progress.
    pub stop: &'a AtomicBool,
    world: Arc<dyn Communicator>,
    data_group: Arc<dyn Communicator>,
    plan: TrainPlan,
    attempts: u64,
    saves: Saves,
}

impl<'a> Trainer<'a> {
    /// A run over `world`, with nothing optional set; `plan` is the one that the engine was built from.
    /// Collective.
    ///
    /// # Errors
    /// Communicator errors.
    pub fn new(
        job: &'a JobSpec,
        engine: Guarded,
        plan: &TrainPlan,
        objective: &'a dyn Objective,
        data: Box<dyn BatchSource>,
        world: Arc<dyn Communicator>,
        stop: &'a AtomicBool,
    ) -> Result<Self> {
        let peers = plan.mesh.group(
            world.rank(),
            &[MeshAxis::DataReplicate, MeshAxis::DataShard],
        )?;
        let data_group = world.subgroup(&peers, "trainer_data")?;
        Ok(Self {
            job,
            engine,
            objective,
            data,
            validation: None,
            checkpoints: None,
            peak_flops: None,
            stop,
            world,
            data_group,
            plan: plan.clone(),
            attempts: 0,
            saves: Saves::default(),
        })
    }

    /// Continues from a checkpoint: engine state and data position.
    ///
    /// # Errors
    /// `Checkpoint` if it is another model's or another data set's.
    pub fn resume(&mut self, checkpoint: &dyn StateReader) -> Result<()> {
        let position = checkpoint.blob(DATA_BLOB).ok_or_else(|| {
            Error::new(
                ErrorKind::Checkpoint,
                "resume",
                "the checkpoint holds no data position",
            )
            .help("it was not written by the trainer: load it into an engine instead")
        })?;
        self.data.restore(position)?;
        self.engine.load_state(checkpoint)?;
        let step = self.engine.step();
        let attempts = checkpoint.blob(ATTEMPTS_BLOB).and_then(|n| n.as_u64());
        (self.attempts, self.saves.last) = (attempts.unwrap_or(step), Some(step));
        Ok(())
    }

    /// What a metrics file holds of the run so far.
    pub fn kept(&self) -> Kept {
        Kept {
            step: self.engine.step(),
            attempts: self.attempts,
        }
    }

    /// Trains until `steps` are committed or a stop is asked for. Where checkpoints are due now and then, the last
    /// step has one too, so that a longer job can go on from it. When this returns, no save is under way.
    ///
    /// # Errors
    /// Those of engine, data, checkpoints and communicator; `NonFinite` after many skipped steps in a row, and
    /// naming the weight where one that is to be saved is not finite. One save that fails is told to the observer
    /// and the next one tried; a second in a row, and one after which the run was to end, is an error.
    pub fn run(&mut self, observer: &mut dyn Observer) -> Result<Outcome> {
        let outcome = self.train(observer);
        // What is not finite ends every rank alike: none of them is at another operation.
        if let Err(error) = &outcome
            && error.kind() == ErrorKind::NonFinite
            && let Err(second) = self.finish_saves(observer)
        {
            tracing::warn!("a checkpoint was not saved: {second}");
        }
        outcome
    }

    fn train(&mut self, observer: &mut dyn Observer) -> Result<Outcome> {
        let mut skipped = 0;
        while self.engine.step() < self.job.config.steps {
            let began = Instant::now();
            let next = self.engine.step() + 1;
            let _step = trace::step(self.world.rank(), next);
            let phase = trace::phase("data");
            let mut global = self.data.next_batch()?;
            let mut totals = BatchTotals::count(&global);
            self.objective.prepare(&mut global, &mut totals)?;
            let mut share = self
                .cut(&global)?
                .share(&global, self.plan.mesh.data_index(self.world.rank()))?;
            drop(phase);
            complete(&mut share, &mut self.engine, self.objective)?;

            let report = self
                .engine
                .forward_backward(&share, self.objective, &totals)
                .map_err(|error| in_step(error, next))?;
            let optim = self.engine.optim_step(&StepOptions::default())?;
            self.attempts += 1;

            skipped = if optim.skipped { skipped + 1 } else { 0 };
            let step = optim.step;
            observer.on_step(&self.record(&global, report, &optim, began)?)?;
            trace::memory(|| self.engine.memory());
            if skipped > MAX_SKIPPED {
                return Err(skipping(step, skipped));
            }
            let due = |every: Option<u64>| !optim.skipped && every.is_some_and(|n| step % n == 0);
            if due(self.job.config.validation.every) {
                self.validate(observer)?;
            }
            let (stop, saved) = self.agree()?;
            if saved {
                self.settle(false, observer)?;
            }
            if stop {
                // After a skipped step too: the data has gone on.
                self.save(observer)?;
                return Ok(Outcome::Stopped { step });
            }
            if due(self.job.config.checkpoint.every) {
                self.save_due(observer)?;
            }
        }
        if self.job.config.checkpoint.every.is_some() {
            self.save_once(observer)?;
        }
        Ok(Outcome::Finished {
            step: self.engine.step(),
        })
    }

    /// Mean NLL over the validation sequences, reported to the observer. Changes nothing.
    ///
    /// # Errors
    /// Those of engine and communicator.
    pub fn validate(&mut self, observer: &mut dyn Observer) -> Result<()> {
        let Some(all) = self.validation.take() else {
            return Ok(());
        };
        let chunk = self.job.config.batch.global_batch_size;
        let rank = self.plan.mesh.data_index(self.world.rank());
        let mut shares = Vec::new();
        for first in (0..all.num_sequences()).step_by(chunk) {
            let last = (first + chunk).min(all.num_sequences());
            let part = all.select(&(first..last).collect::<Vec<_>>());
            shares.push(self.cut(&part)?.share(&part, rank)?);
        }
        let temperature = self.objective.requires().temperature;
        let loss = mean_nll(&mut self.engine, &shares, temperature, &*self.data_group);
        self.validation = Some(all);
        observer.on_validation(self.engine.step(), loss?)
    }

    fn cut(&self, global: &Batch) -> Result<MicrobatchPlan> {
        let limit = MicrobatchLimit::from_config(&self.job.config.batch);
        self.plan.cut(global, limit)
    }

    /// Whether to stop, and whether the save under way goes on. Ranks see both at different times: all stop if any
    /// was asked to, and a save goes on when every rank has done its part.
    fn agree(&self) -> Result<(bool, bool)> {
        let stop = self.stop.load(Ordering::Relaxed);
        let mut flags = [stop, !self.saves.is_ready()].map(u8::from);
        self.world
            .all_reduce((&mut flags[..]).into(), ReduceOp::Max)?
            .wait()?;
        Ok((flags[0] != 0, flags[1] == 0))
    }
}

/// A value that is not finite is seldom the data's fault.
fn in_step(error: Error, step: u64) -> Error {
    let silent = error.kind() == ErrorKind::NonFinite && error.remedy().is_none();
    let error = error.with("step", step);
    match silent {
        true => error.help(
            "look for non-finite weights in the model folder, or lower the learning rate and go on from a \
             checkpoint",
        ),
        false => error,
    }
}

fn skipping(step: u64, count: u32) -> Error {
    Error::new(
        ErrorKind::NonFinite,
        "train",
        "every gradient of many steps in a row was not finite",
    )
    .with("step", step)
    .with("skipped", count)
    .help("look for non-finite weights in the model folder, or lower the learning rate and resume")
}

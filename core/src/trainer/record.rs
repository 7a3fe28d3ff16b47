//! What a run reports, step by step.

use std::time::Instant;

use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

use super::Trainer;
use crate::{
    Error, Result,
    batch::Batch,
    communicator::{Communicator, Work},
    engine::{Engine, ForwardBackwardReport, MemoryReport, OptimReport},
    metrics::{JsonRecord, Metrics, peak_resident_bytes, resident_bytes},
};

/// One step's numbers, the same on every rank but for times. Serialised as [`StepRecord::to_json`].
#[derive(Debug, Clone, PartialEq)]
pub struct StepRecord {
    /// Committed steps; a skipped step repeats the number before it.
    pub step: u64,
    /// The global loss before the update.
    pub loss: f64,
    /// 2-norm of the whole gradient before clipping.
    pub grad_norm: f64,
    /// What the gradient was multiplied by.
    pub clip_factor: f64,
    /// Learning rate used.
    pub learning_rate: f64,
    /// Whether a non-finite gradient made every rank skip.
    pub skipped: bool,
    /// Tokens of the global batch.
    pub tokens: usize,
    /// Wall seconds.
    pub seconds: f64,
    /// Tokens of all ranks a second.
    pub tokens_per_second: f64,
    /// Model FLOPs of forward and backward, all ranks.
    pub flops: f64,
    /// Model FLOP/s over what all ranks could reach, where that is known.
    pub mfu: Option<f64>,
    /// Peak resident bytes of this process so far, where the system tells.
    pub peak_memory: Option<u64>,
    /// What each rank holds, by rank; empty unless `metrics.memory` asks for it.
    pub memory: Vec<RankMemory>,
    /// The objective's own metrics.
    pub metrics: Metrics,
}

/// What a rank holds at the end of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct RankMemory {
    /// As its engine counts it.
    #[serde(flatten)]
    pub report: MemoryReport,
    /// Bytes of its process that are resident; of thread ranks the same one's. 0 where the system does not tell.
    pub resident: u64,
}

impl RankMemory {
    const NUM: usize = 7;

    /// Every rank's, in rank order. Collective.
    pub(super) fn gather(report: MemoryReport, world: &dyn Communicator) -> Result<Vec<Self>> {
        let own = [
            report.parameters,
            report.gradients,
            report.optimizer,
            report.snapshots,
            report.peak_activations,
            report.saved_activations,
            resident_bytes().unwrap_or(0),
        ]
        .map(|bytes| bytes as i64);
        let mut all = vec![0i64; Self::NUM * world.world_size()];
        let counts = vec![Self::NUM; world.world_size()];
        world
            .all_gather(own.as_slice().into(), (&mut all).into(), &counts)
            .and_then(Work::wait)?;
        let of_rank = |numbers: &[i64]| {
            let bytes = |n: usize| numbers[n] as u64;
            Self {
                report: MemoryReport {
                    parameters: bytes(0),
                    gradients: bytes(1),
                    optimizer: bytes(2),
                    snapshots: bytes(3),
                    peak_activations: bytes(4),
                    saved_activations: bytes(5),
                },
                resident: bytes(6),
            }
        };
        Ok(all.chunks_exact(Self::NUM).map(of_rank).collect())
    }
}

impl StepRecord {
    /// Each field by its name, in order. What is not finite is `null`, and named under `non_finite`.
    pub fn to_json(&self) -> Map<String, Value> {
        let mut json = JsonRecord::default();
        json.value("step", self.step);
        json.number("loss", self.loss);
        json.number("grad_norm", self.grad_norm);
        json.number("clip_factor", self.clip_factor);
        json.number("learning_rate", self.learning_rate);
        json.value("skipped", self.skipped);
        json.value("tokens", self.tokens);
        json.number("seconds", self.seconds);
        json.number("tokens_per_second", self.tokens_per_second);
        json.number("flops", self.flops);
        json.value("mfu", self.mfu);
        json.value("peak_memory", self.peak_memory);
        if !self.memory.is_empty() {
            json.value("memory", serde_json::json!(self.memory));
        }
        json.value("metrics", self.metrics.to_json());
        json.finish()
    }
}

impl Serialize for StepRecord {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        self.to_json().serialize(serializer)
    }
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// All steps are committed.
    Finished {
        /// Committed steps.
        step: u64,
    },
    /// A stop was asked for; where checkpoints are kept, this step's is the last.
    Stopped {
        /// Committed steps.
        step: u64,
    },
}

/// Sees a run: progress, files, tests. On ranks that report nothing, `&mut ()`.
pub trait Observer {
    /// A step has ended.
    ///
    /// # Errors
    /// The observer's own; they end the run.
    fn on_step(&mut self, _record: &StepRecord) -> Result<()> {
        Ok(())
    }

    /// A validation pass has ended with this mean NLL.
    ///
    /// # Errors
    /// The observer's own; they end the run.
    fn on_validation(&mut self, _step: u64, _loss: f64) -> Result<()> {
        Ok(())
    }

    /// A checkpoint is on disk.
    ///
    /// # Errors
    /// The observer's own; they end the run.
    fn on_checkpoint(&mut self, _step: u64) -> Result<()> {
        Ok(())
    }

    /// The checkpoint of this step could not be written; the run goes on, and the next one is tried.
    ///
    /// # Errors
    /// The observer's own; they end the run.
    fn on_checkpoint_failed(&mut self, _step: u64, _error: &Error) -> Result<()> {
        Ok(())
    }

    /// The checkpoint that was due at this step is not made: one is still being written.
    ///
    /// # Errors
    /// The observer's own; they end the run.
    fn on_checkpoint_skipped(&mut self, _step: u64) -> Result<()> {
        Ok(())
    }
}

impl Observer for () {}

impl Trainer<'_> {
    pub(super) fn record(
        &self,
        global: &Batch,
        report: ForwardBackwardReport,
        optim: &OptimReport,
        began: Instant,
    ) -> Result<StepRecord> {
        let memory = match self.job.config.metrics.memory {
            true => RankMemory::gather(self.engine.memory(), &*self.world)?,
            false => Vec::new(),
        };
        let seconds = began.elapsed().as_secs_f64();
        let flops = self.job.model.train_flops(&global.lengths());
        Ok(StepRecord {
            step: self.engine.step(),
            loss: report.loss,
            grad_norm: optim.grad_norm,
            clip_factor: optim.clip_factor,
            learning_rate: optim.learning_rate,
            skipped: optim.skipped,
            tokens: global.num_tokens(),
            seconds,
            tokens_per_second: global.num_tokens() as f64 / seconds,
            flops,
            mfu: self.peak_flops.map(|peak| flops / seconds / peak),
            peak_memory: peak_resident_bytes(),
            memory,
            metrics: report.metrics,
        })
    }
}

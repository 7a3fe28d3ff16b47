//! The contract: what a training backend is and what its engine does.

mod build;
mod capability;
mod guard;
mod report;

pub use build::build_engine;
pub use capability::{
    Capability, ContextParallel, DataParallel, ExpertParallel, Moe, PipelineParallel,
    RecomputeCapability, TensorParallel,
};
pub use guard::{GuardOptions, Guarded};
pub use report::{ForwardBackwardReport, MemoryReport, OptimReport};

use std::{fmt, sync::Arc};

use crate::{
    Diagnostic, Error, ErrorKind, Result,
    batch::{Batch, BatchTotals},
    checkpoint::{SaveHandle, StateReader, StateWriter},
    communicator::Communicator,
    config::JobSpec,
    objective::{Objective, TokenOutputs},
    plan::TrainPlan,
    weights::{WeightSink, WeightSource},
};

/// A way to train: names itself, says what it can do, checks and plans a job, and builds engines.
///
/// `check` and `plan` touch no device, no weights and no network.
pub trait Backend: Send + Sync + fmt::Debug {
    /// The word after `backend:`.
    fn name(&self) -> &str;

    /// What it can do; nothing that is not said here.
    fn capability(&self) -> Capability;

    /// Whether it stands for the exact value, as an f64 oracle does: other engines are held against it.
    fn is_exact(&self) -> bool {
        false
    }

    /// JSON schema of this backend's own options (`backends.<name>` in the config); `None` where it has none.
    fn options_schema(&self) -> Option<schemars::Schema> {
        None
    }

    /// Every fault of a job that only this backend knows, at once. What core can know (the rules, and what
    /// [`Backend::capability`] says) [`check_job`](crate::config::check_job) judges.
    fn check(&self, job: &JobSpec) -> Vec<Diagnostic> {
        let _ = job;
        Vec::new()
    }

    /// What each rank will hold and do, for a job in which [`check_job`](crate::config::check_job) finds no
    /// fault.
    ///
    /// # Errors
    /// `Config` where it cannot be planned.
    fn plan(&self, job: &JobSpec) -> Result<TrainPlan>;

    /// This rank's engine. Collective: every rank of `world` calls it. The engine splits `world` into the
    /// groups its mesh needs.
    ///
    /// # Errors
    /// Those of reading weights, of the device, and of the communicator.
    fn build(
        &self,
        plan: &TrainPlan,
        world: Arc<dyn Communicator>,
        init: WeightInit<'_>,
    ) -> Result<Box<dyn Engine>>;
}

/// Where an engine's first weights come from.
#[derive(Debug)]
pub enum WeightInit<'a> {
    /// Drawn by [`crate::weights::SeededWeights`] from this seed: the same on any mesh.
    Seed(u64),
    /// Read, by Hugging Face names.
    Source(&'a dyn WeightSource),
    /// Left 0, to be filled by [`Engine::load_state`].
    Deferred,
}

/// Which weights a forward pass uses.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Weights {
    /// Those being trained.
    #[default]
    Policy,
    /// A snapshot (the reference policy, the policy that made the rollouts).
    Tag(String),
}

/// Whether logits can be divided by a temperature, in f32 too: above 0 and finite.
pub fn is_temperature(temperature: f64) -> bool {
    temperature > 0.0 && (temperature as f32).is_normal()
}

/// What a scoring pass computes.
#[derive(Debug, Clone, PartialEq)]
pub struct ScoreRequest {
    /// Which weights.
    pub weights: Weights,
    /// Divides the logits before log-prob and entropy alike; above 0.
    pub temperature: f64,
    /// Whether entropies are wanted.
    pub entropy: bool,
    /// Names a per-token `I64` column `[T, k]` of token ids whose log-probs are wanted.
    pub log_probs_at: Option<String>,
}

impl Default for ScoreRequest {
    fn default() -> Self {
        Self {
            weights: Weights::Policy,
            temperature: 1.0,
            entropy: false,
            log_probs_at: None,
        }
    }
}

/// Options of one optimizer step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepOptions {
    /// Replaces the schedule's learning rate for this step.
    pub learning_rate: Option<f64>,
    /// Divides the accumulated gradients, before norm and clipping: the totals that were deferred for streamed rollouts. 1 where
    /// `forward_backward` was given the final totals.
    pub gradient_divisor: Option<f64>,
}

/// One rank's part of a model in training.
///
/// Order of calls: any number of `forward_backward`, then `optim_step` (or `abort` or `zero_grad`, which drop
/// the open step). `forward` may come at any time and changes nothing. A step commits at one point, the
/// all-reduce of gradient norm and finite flag in `optim_step`: before it nothing that is saved has changed.
///
/// All calls are collective over the ranks of the mesh, but for `memory`.
///
/// A rank passes its data-parallel share of a batch, the same on all its model-parallel peers (tensor, context,
/// pipeline, expert); every rank's is cut into as many micro-batches. What comes back is whole, and bit for bit equal
/// on these peers: outputs for every token of the share, in its order, whichever rank computed them
/// ([`MicrobatchPlan::gather`](crate::plan::MicrobatchPlan::gather) brings them into the global batch's order); reports
/// are equal on every rank of the mesh. The guard refuses shares that differ among peers.
///
/// What only some backends claim (gradients, checkpoints, snapshots, offloading) is `Unsupported` unless an
/// engine implements it.
pub trait Engine: Send + fmt::Debug {
    /// Adds the gradients of the objective over this rank's share of the global batch, micro-batch by
    /// micro-batch as the batch is cut. Loss and metrics in the report are sums over all data-parallel ranks.
    ///
    /// # Errors
    /// The objective's, of any rank, on every rank; communicator errors. The open step is then dropped.
    fn forward_backward(
        &mut self,
        batch: &Batch,
        objective: &dyn Objective,
        totals: &BatchTotals,
    ) -> Result<ForwardBackwardReport>;

    /// Log-probs of this rank's share, in the batch's order, 0 for a sequence's first token. Every token but
    /// the first of its sequence is scored, whatever the loss mask says.
    ///
    /// # Errors
    /// `Config` for an unknown tag; communicator errors.
    fn forward(&mut self, batch: &Batch, request: &ScoreRequest) -> Result<TokenOutputs>;

    /// Clips by the global norm and updates the weights, or skips on every rank alike if any gradient is not
    /// finite: then weights, moments, step count and schedule stay.
    ///
    /// # Errors
    /// Communicator errors.
    fn optim_step(&mut self, options: &StepOptions) -> Result<OptimReport>;

    /// Drops the accumulated gradients.
    ///
    /// # Errors
    /// Device errors.
    fn zero_grad(&mut self) -> Result<()>;

    /// Drops the open step: state as before it.
    ///
    /// # Errors
    /// Device errors.
    fn abort(&mut self) -> Result<()> {
        self.zero_grad()
    }

    /// Number of committed optimizer steps.
    fn step(&self) -> u64;

    /// Streams weights, bucket by bucket, in the order of `ModelSpec::parameters`.
    ///
    /// # Errors
    /// The sink's; then the sink is aborted.
    fn export_weights(&mut self, weights: &Weights, sink: &mut dyn WeightSink) -> Result<()>;

    /// Streams the accumulated gradients of the open step, unclipped and reduced over data-parallel ranks, as
    /// f32 (f64 where the engine computes so) under the parameters' names. For conformance and inspection.
    ///
    /// # Errors
    /// `CallOrder` if no step is open; the sink's.
    fn export_gradients(&mut self, sink: &mut dyn WeightSink) -> Result<()> {
        let _ = sink;
        Err(unclaimed("export_gradients"))
    }

    /// Reads weights into the policy or into a snapshot, which is made if absent. Each rank has a source of its
    /// own; ranks [agree](crate::communicator::Communicator) that all have read before anything changes.
    ///
    /// # Errors
    /// The source's, of any rank; then nothing has changed on any.
    fn import_weights(&mut self, weights: &Weights, source: &dyn WeightSource) -> Result<()>;

    /// Writes this rank's pieces of weights, moments and step. The writer is complete when the handle is
    /// finished.
    ///
    /// # Errors
    /// The writer's.
    fn save_state(&mut self, writer: Box<dyn StateWriter>) -> Result<SaveHandle> {
        drop(writer);
        Err(unclaimed("save_state"))
    }

    /// Reads the state that any engine in any layout saved.
    ///
    /// # Errors
    /// `Checkpoint` if the model differs; the reader's. Then the engine must be dropped.
    fn load_state(&mut self, reader: &dyn StateReader) -> Result<()> {
        let _ = reader;
        Err(unclaimed("load_state"))
    }

    /// Keeps a copy of the policy's weights under a tag, replacing an older one.
    ///
    /// # Errors
    /// Device errors.
    fn snapshot(&mut self, tag: &str) -> Result<()> {
        Err(unclaimed("snapshot").with("tag", tag))
    }

    /// Drops a snapshot.
    ///
    /// # Errors
    /// `Config` for an unknown tag.
    fn drop_snapshot(&mut self, tag: &str) -> Result<()> {
        Err(unclaimed("drop_snapshot").with("tag", tag))
    }

    /// Moves weights, gradients and moments between memories.
    ///
    /// # Errors
    /// `Unsupported` unless claimed.
    fn set_residency(&mut self, residency: Residency) -> Result<()> {
        match residency {
            Residency::Device => Ok(()),
            Residency::OptimizerOffloaded | Residency::Offloaded => Err(unclaimed("set_residency")),
        }
    }

    /// What this rank holds now, and the peak since it was built.
    fn memory(&self) -> MemoryReport;
}

/// What an engine answers that does not implement a call. The guard answers before it, by the capability.
fn unclaimed(operation: &'static str) -> Error {
    Error::new(
        ErrorKind::Unsupported,
        operation,
        "the engine does not do this",
    )
}

/// Where an engine's long-lived state lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Residency {
    /// On the device, ready to train.
    #[default]
    Device,
    /// Optimizer state in host memory, weights on the device: ready to score.
    OptimizerOffloaded,
    /// All in host memory.
    Offloaded,
}

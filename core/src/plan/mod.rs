//! What each rank will hold and do, as plain data.

mod holding;
mod microbatch;
mod schedule;
mod sizes;

pub use holding::{Holding, Holdings, share};
pub use microbatch::{MicrobatchLimit, MicrobatchPlan, plan_microbatches};
pub use schedule::{PipelineAction, PipelineSchedule};
pub use sizes::Sizes;

use serde::{Deserialize, Serialize};

use crate::{
    config::JobConfig,
    mesh::{DeviceMesh, MeshAxis},
    model::{ModelSpec, ParameterSpec},
};

/// A job resolved for one backend: what an engine is built from, and what people read before it runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TrainPlan {
    /// The backend that made it.
    pub backend: String,
    /// How ranks are arranged.
    pub mesh: DeviceMesh,
    /// The model.
    pub model: ModelSpec,
    /// The job's settings that an engine reads (precision, optimizer, schedule, recompute, budgets, options).
    pub config: JobConfig,
    /// Every parameter, in `ModelSpec::parameters`' order.
    pub parameters: Vec<ParameterSpec>,
    /// Layers of each model chunk: stage `i % pipeline`, chunk `i / pipeline`.
    pub stages: Vec<std::ops::Range<usize>>,
    /// What a rank does with its micro-batches, by stage.
    pub schedule: Vec<PipelineSchedule>,
    /// Operations of one micro-batch of `reference_tokens` tokens, forward and backward.
    pub ops: Vec<PlannedOp>,
    /// Collectives of one step.
    pub collectives: Vec<PlannedCollective>,
    /// Tokens that `ops` was counted for.
    pub reference_tokens: usize,
}

/// One operation of a micro-batch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlannedOp {
    /// What it is: `gemm`, `attention`, `rms_norm`, ...
    pub kind: String,
    /// Where in the model: `layers.0.attention.q_proj`.
    pub module: String,
    /// Rows.
    pub m: usize,
    /// Columns.
    pub n: usize,
    /// Inner size.
    pub k: usize,
    /// Bytes kept from forward to backward.
    pub saved_bytes: u64,
}

/// One collective of a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlannedCollective {
    /// `all_gather`, `reduce_scatter`, ...
    pub operation: String,
    /// The axis whose ranks take part.
    pub axis: MeshAxis,
    /// Bytes of the whole buffer.
    pub bytes: u64,
    /// How often a step does it.
    pub count: usize,
    /// What it may overlap with, if anything.
    pub overlaps: Option<String>,
}

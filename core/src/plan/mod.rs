//! What each rank will hold and do, as plain data.

mod gather;
mod holding;
mod microbatch;
mod schedule;
mod sizes;
mod stages;

pub use holding::{Holding, Holdings, share};
pub use microbatch::{MicrobatchLimit, MicrobatchPlan, plan_microbatches};
pub use schedule::{PipelineAction, PipelineKind, PipelineSchedule};
pub use sizes::Sizes;
pub use stages::stages;

use serde::{Deserialize, Serialize};

use crate::{
    Result,
    batch::Batch,
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
    /// Layers of each part of the model, as [`stages`] cuts them: entry `i` is chunk `i / pipeline` of stage
    /// `i % pipeline`.
    pub stages: Vec<std::ops::Range<usize>>,
    /// The kind of schedule that the stages run; [`PipelineSchedule::of`] makes it for each batch.
    pub schedule: PipelineKind,
    /// Operations of one micro-batch of `reference_tokens` tokens, forward and backward.
    pub ops: Vec<PlannedOp>,
    /// Collectives of one step.
    pub collectives: Vec<PlannedCollective>,
    /// Tokens that `ops` was counted for.
    pub reference_tokens: usize,
}

impl TrainPlan {
    /// Cuts a global batch for the mesh, into a number of micro-batches that the schedule takes.
    ///
    /// # Errors
    /// `Config` if the limit is 0.
    pub fn cut(&self, global: &Batch, limit: MicrobatchLimit) -> Result<MicrobatchPlan> {
        let multiple_of = self.schedule.multiple_of(self.mesh.pipeline);
        let (lengths, groups) = (global.lengths(), global.groups());
        plan_microbatches(&lengths, groups, self.mesh.data_size(), limit, multiple_of)
    }
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

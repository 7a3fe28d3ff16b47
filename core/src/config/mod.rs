//! What a job is: the YAML file as typed data.

mod job;
mod sections;

pub use job::{JobConfig, JobSpec};
pub use sections::{
    BatchConfig, CheckpointConfig, DataConfig, DeviceConfig, KlEstimator, LossAggregation,
    ObjectiveConfig, ObjectiveKind, OptimizerConfig, Overlong, ParallelConfig, PrecisionConfig,
    RecomputeConfig, RecomputeModule, ScheduleConfig, ScheduleKind, ValidationConfig,
};

//! What a job is: the YAML file as typed data, and every fault in it.
//!
#![doc = include_str!("../manual/rules.md")]

mod emit;
mod job;
mod load;
mod rules;
mod sections;

pub use job::{CHECKPOINTS, JOB, JobConfig, JobSpec, METRICS, MODEL, TENSORBOARD};
pub use load::{JobSource, LoadedJob, load_job};
pub(crate) use rules::judge_job;
pub use rules::{check_job, rule_list};
pub use sections::{
    BatchConfig, CheckpointConfig, DataConfig, DeviceConfig, KlEstimator, LoadBalancing,
    LossAggregation, MetricsConfig, MoeConfig, ObjectiveConfig, ObjectiveKind, OptimizerConfig,
    Overlong, ParallelConfig, PrecisionConfig, RecomputeConfig, RecomputeModule, ScheduleConfig,
    ScheduleKind, ValidationConfig, WhenBusy,
};

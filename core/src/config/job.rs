//! The whole job.

use std::path::PathBuf;

use indexmap::IndexMap;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::sections::{
    BatchConfig, CheckpointConfig, DataConfig, DeviceConfig, MetricsConfig, MoeConfig,
    ObjectiveConfig, OptimizerConfig, Overlong, ParallelConfig, PrecisionConfig, RecomputeConfig,
    ScheduleConfig, ValidationConfig,
};
use crate::{Error, ErrorKind, Result, mesh::DeviceMesh, model::ModelSpec};

/// File under a job's output: the job as it ran.
pub const JOB: &str = "job.yaml";
/// File under a job's output: metrics, a JSON object a step.
pub const METRICS: &str = "metrics.jsonl";
/// Folder under a job's output: checkpoints.
pub const CHECKPOINTS: &str = "checkpoints";
/// Folder under a job's output: TensorBoard's event files.
pub const TENSORBOARD: &str = "tensorboard";
/// Folder under a job's output: the trained model, in Hugging Face form.
pub const MODEL: &str = "model";

/// A job as its YAML file says it. Unknown keys are errors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct JobConfig {
    /// A Hugging Face folder, or a hub id such as `HuggingFaceTB/SmolLM2-135M`.
    pub model: String,
    /// The engine.
    pub backend: String,
    /// Key of every random choice: weights, shuffling.
    #[serde(default)]
    pub seed: u64,
    /// Start from random weights (keyed by `seed`) instead of the folder's.
    #[serde(default)]
    pub from_scratch: bool,
    /// Optimizer steps to take.
    #[schemars(range(min = 1))]
    pub steps: u64,
    /// Folder for metrics, checkpoints and the trained model.
    pub output: PathBuf,
    /// Training data.
    pub data: DataConfig,
    /// How much data a step takes and how it is cut.
    pub batch: BatchConfig,
    /// The loss.
    #[serde(default)]
    pub objective: ObjectiveConfig,
    /// AdamW.
    #[serde(default)]
    pub optimizer: OptimizerConfig,
    /// Learning rate over the steps.
    #[serde(default)]
    pub schedule: ScheduleConfig,
    /// A mixture of experts.
    #[serde(default)]
    pub moe: MoeConfig,
    /// How ranks are arranged.
    #[serde(default)]
    pub parallel: ParallelConfig,
    /// Dtypes.
    #[serde(default)]
    pub precision: PrecisionConfig,
    /// What backward computes again instead of keeping it.
    #[serde(default)]
    pub recompute: RecomputeConfig,
    /// Device.
    #[serde(default)]
    pub device: DeviceConfig,
    /// Checkpoints.
    #[serde(default)]
    pub checkpoint: CheckpointConfig,
    /// Validation passes.
    #[serde(default)]
    pub validation: ValidationConfig,
    /// What a run tells of itself beside `metrics.jsonl`.
    #[serde(default)]
    pub metrics: MetricsConfig,
    /// Most bytes that logits and their gradient may take at once on a rank.
    #[serde(default = "default_logits_budget")]
    #[schemars(range(min = 65536))]
    pub logits_budget_bytes: u64,
    /// Seconds after which a collective operation that some rank did not join is an error.
    #[serde(default = "default_timeout")]
    #[schemars(range(min = 0.001))]
    pub timeout_seconds: f64,
    /// Options of each backend, by its name; only those of the chosen one are read.
    #[serde(default)]
    pub backends: IndexMap<String, serde_json::Map<String, serde_json::Value>>,
}

impl JobConfig {
    /// A job built in code, every other setting at its default. Its caller brings model, weights and batches, so
    /// that `data.train` and `output` name nothing. The learning rate's schedule spans `steps`.
    pub fn new(
        model: impl Into<String>,
        backend: impl Into<String>,
        steps: u64,
        global_batch_size: usize,
    ) -> Self {
        Self {
            model: model.into(),
            backend: backend.into(),
            seed: 0,
            from_scratch: false,
            steps,
            output: PathBuf::new(),
            data: DataConfig {
                train: PathBuf::new(),
                validation: None,
                max_length: None,
                overlong: Overlong::default(),
                shuffle: true,
            },
            batch: BatchConfig {
                global_batch_size,
                micro_batch_size: None,
                micro_batch_tokens: None,
            },
            objective: ObjectiveConfig::default(),
            optimizer: OptimizerConfig::default(),
            schedule: ScheduleConfig::default(),
            moe: MoeConfig::default(),
            parallel: ParallelConfig::default(),
            precision: PrecisionConfig::default(),
            recompute: RecomputeConfig::default(),
            device: DeviceConfig::default(),
            checkpoint: CheckpointConfig::default(),
            validation: ValidationConfig::default(),
            metrics: MetricsConfig::default(),
            logits_budget_bytes: default_logits_budget(),
            timeout_seconds: default_timeout(),
            backends: IndexMap::new(),
        }
    }
}

fn default_logits_budget() -> u64 {
    256 << 20
}

fn default_timeout() -> f64 {
    600.0
}

/// A job with its model read: what `check` and `plan` see.
#[derive(Debug, Clone, PartialEq)]
pub struct JobSpec {
    /// The config, overrides applied.
    pub config: JobConfig,
    /// The model of `config.model`.
    pub model: ModelSpec,
}

impl JobSpec {
    /// The mesh that `parallel` asks for.
    ///
    /// # Errors
    /// `Config` if the replicas do not divide the data-parallel ranks.
    pub fn mesh(&self) -> Result<DeviceMesh> {
        let p = &self.config.parallel;
        let (data, replicas) = (p.data_parallel_size, p.data_replicate_size);
        if replicas == 0 || !data.is_multiple_of(replicas) {
            return Err(Error::new(
                ErrorKind::Config,
                "read_mesh",
                "the replicas do not divide the data-parallel ranks",
            )
            .with("data_parallel_size", data)
            .with("data_replicate_size", replicas));
        }
        Ok(DeviceMesh {
            pipeline: p.pipeline_parallel_size,
            data_replicate: replicas,
            data_shard: data / replicas,
            context: p.context_parallel_size,
            tensor: p.tensor_parallel_size,
            expert: p.expert_parallel_size,
            expert_tensor: p.expert_tensor_size(),
        })
    }
}

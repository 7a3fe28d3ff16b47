//! The sections of a job. Every key, its unit and its default.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::DType;

/// Training data.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// A jsonl file with a sequence a line.
    pub train: PathBuf,
    /// jsonl for validation passes.
    #[serde(default)]
    pub validation: Option<PathBuf>,
    /// Longest sequence in tokens; the model's `max_position_embeddings` if unsaid.
    #[serde(default)]
    #[schemars(range(min = 2))]
    pub max_length: Option<usize>,
    /// What happens to longer ones.
    #[serde(default)]
    pub overlong: Overlong,
    /// Whether each epoch is a new order, keyed by `seed`.
    #[serde(default = "yes")]
    pub shuffle: bool,
}

/// What happens to a sequence over the limit; whatever it is, the count is reported.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Overlong {
    /// An error that names the line.
    #[default]
    Error,
    /// Left out.
    Skip,
    /// Cut at the limit.
    Truncate,
}

/// How much data a step takes and how it is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BatchConfig {
    /// Sequences a step, over all ranks.
    #[schemars(range(min = 1, max = 16_777_216))]
    pub global_batch_size: usize,
    /// Sequences of one micro-batch on one rank; with neither this nor `micro_batch_tokens`, a rank's whole
    /// share is one micro-batch.
    #[serde(default)]
    #[schemars(range(min = 1))]
    pub micro_batch_size: Option<usize>,
    /// Most tokens of one micro-batch on one rank; balances ranks by tokens.
    #[serde(default)]
    #[schemars(range(min = 1))]
    pub micro_batch_tokens: Option<usize>,
}

/// The loss and its settings. Keys that the kind does not use are refused.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ObjectiveConfig {
    /// Which loss.
    pub kind: ObjectiveKind,
    /// How tokens and sequences are averaged; each kind's own default if unsaid.
    pub aggregation: Option<LossAggregation>,
    /// Constant divisor for `aggregation: constant`.
    pub divisor: Option<f64>,
    /// Divides the logits, in training and scoring alike.
    pub temperature: f64,
    /// PPO, GRPO, GSPO, CISPO, DAPO: how far the ratio may fall below 1.
    pub clip_low: Option<f64>,
    /// How far it may rise above 1.
    pub clip_high: Option<f64>,
    /// PPO's dual clip: bound on the loss for negative advantages, above 1.
    pub dual_clip: Option<f64>,
    /// Weight of the KL term to the reference policy.
    pub kl_coefficient: f64,
    /// Estimator of that KL: k1, k2 or k3.
    pub kl_estimator: Option<KlEstimator>,
    /// Weight of the entropy bonus.
    pub entropy_coefficient: f64,
    /// DPO's beta.
    pub beta: Option<f64>,
    /// DPO's label smoothing.
    pub label_smoothing: f64,
}

impl Default for ObjectiveConfig {
    fn default() -> Self {
        Self {
            kind: ObjectiveKind::Nll,
            aggregation: None,
            divisor: None,
            temperature: 1.0,
            clip_low: None,
            clip_high: None,
            dual_clip: None,
            kl_coefficient: 0.0,
            kl_estimator: None,
            entropy_coefficient: 0.0,
            beta: None,
            label_smoothing: 0.0,
        }
    }
}

/// Which loss.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ObjectiveKind {
    /// Negative log-likelihood: supervised fine-tuning.
    #[default]
    Nll,
    /// PPO's clipped surrogate.
    Ppo,
    /// Group-relative policy optimization.
    Grpo,
    /// GRPO with decoupled clips and token mean.
    Dapo,
    /// GRPO with sequence-level ratios.
    Gspo,
    /// Clipped importance weights.
    Cispo,
    /// Direct preference optimization.
    Dpo,
}

/// Estimator of a KL divergence from samples (Schulman 2020).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KlEstimator {
    /// `log p - log q`.
    K1,
    /// `(log p - log q)^2 / 2`.
    K2,
    /// `q / p - 1 - log(q / p)`.
    K3,
}

/// What the summed loss is divided by, always over the whole global batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LossAggregation {
    /// Mean over scored tokens.
    TokenMean,
    /// Mean over a sequence's scored tokens, then over scored sequences.
    SequenceMean,
    /// Sum divided by `divisor`.
    Constant,
}

/// AdamW with decoupled weight decay (Loshchilov and Hutter 2019).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerConfig {
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Weight decay, times the learning rate, on tensors of 2 dims and more.
    pub weight_decay: f64,
    /// Whether 1-D parameters decay too.
    pub decay_1d: bool,
    /// Largest 2-norm of the whole gradient; `null` is no clipping.
    pub max_grad_norm: Option<f64>,
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self {
            learning_rate: 1e-4,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            decay_1d: false,
            max_grad_norm: Some(1.0),
        }
    }
}

/// Learning rate as a pure function of the step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ScheduleConfig {
    /// Its shape after warmup.
    pub kind: ScheduleKind,
    /// Steps of linear warmup from 0.
    pub warmup_steps: u64,
    /// What the rate ends at, as a part of the peak.
    pub min_ratio: f64,
    /// `warmup_stable_decay`: steps of linear decay at the end.
    pub decay_steps: u64,
}

impl Default for ScheduleConfig {
    fn default() -> Self {
        Self {
            kind: ScheduleKind::Constant,
            warmup_steps: 0,
            min_ratio: 0.0,
            decay_steps: 0,
        }
    }
}

/// Shape of the learning rate after warmup.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ScheduleKind {
    /// The peak.
    #[default]
    Constant,
    /// A line from the peak to `min_ratio` at the last step.
    Linear,
    /// Half a cosine from the peak to `min_ratio`.
    Cosine,
    /// The peak, then a line down over `decay_steps`.
    WarmupStableDecay,
}

/// How ranks are arranged. The product of pipeline, data, context and tensor sizes is the world size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ParallelConfig {
    /// Data-parallel ranks, over which data is split and state is sharded.
    #[schemars(range(min = 1, max = 16384))]
    pub data_parallel_size: usize,
    /// Of these, the number of replicas of the sharded group (HSDP). Divides `data_parallel_size`.
    #[schemars(range(min = 1, max = 16384))]
    pub data_replicate_size: usize,
    /// Tensor-parallel ranks.
    #[schemars(range(min = 1, max = 16384))]
    pub tensor_parallel_size: usize,
    /// Whether norms and residuals are split along the sequence over the tensor ranks.
    pub sequence_parallel: bool,
    /// Context-parallel ranks.
    #[schemars(range(min = 1, max = 16384))]
    pub context_parallel_size: usize,
    /// Pipeline stages.
    #[schemars(range(min = 1, max = 16384))]
    pub pipeline_parallel_size: usize,
    /// Model chunks a stage (interleaved 1F1B).
    #[schemars(range(min = 1, max = 16384))]
    pub virtual_pipeline_size: usize,
    /// Layers of the first stage, over all its chunks, where not an even share.
    pub first_stage_layers: Option<usize>,
    /// Layers of the last stage, over all its chunks, where not an even share.
    pub last_stage_layers: Option<usize>,
    /// Expert-parallel ranks.
    #[schemars(range(min = 1, max = 16384))]
    pub expert_parallel_size: usize,
    /// Tensor-parallel ranks within experts; 1 under expert parallelism if unsaid, else the tensor size.
    #[schemars(range(min = 1, max = 16384))]
    pub expert_tensor_parallel_size: Option<usize>,
    /// Ranks in all; checked against the product where given.
    #[schemars(range(min = 1, max = 16384))]
    pub world_size: Option<usize>,
    /// Threads a rank computes with; the machine's cores divided by the local ranks if unsaid.
    #[schemars(range(min = 1, max = 16384))]
    pub threads_per_rank: Option<usize>,
}

impl ParallelConfig {
    /// Tensor-parallel ranks within experts.
    pub fn expert_tensor_size(&self) -> usize {
        let default = match self.expert_parallel_size {
            1 => self.tensor_parallel_size,
            _ => 1,
        };
        self.expert_tensor_parallel_size.unwrap_or(default)
    }

    /// Threads of each of the `local_ranks` ranks on this machine: as configured, else its cores shared out.
    pub fn threads(&self, local_ranks: usize) -> usize {
        self.threads_per_rank.unwrap_or_else(|| {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            (cores / local_ranks.max(1)).max(1)
        })
    }
}

impl Default for ParallelConfig {
    fn default() -> Self {
        Self {
            data_parallel_size: 1,
            data_replicate_size: 1,
            tensor_parallel_size: 1,
            sequence_parallel: false,
            context_parallel_size: 1,
            pipeline_parallel_size: 1,
            virtual_pipeline_size: 1,
            first_stage_layers: None,
            last_stage_layers: None,
            expert_parallel_size: 1,
            expert_tensor_parallel_size: None,
            world_size: None,
            threads_per_rank: None,
        }
    }
}

/// Dtypes. Masters, moments and reductions are f32 by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PrecisionConfig {
    /// Dtype of activations and of the weights they meet.
    pub compute: DType,
    /// Dtype in which activations are kept from forward to backward; as they were computed if unsaid.
    pub saved_activations: Option<DType>,
    /// Dtype in which gradients are reduced over ranks.
    pub reduce: DType,
    /// Dtype of the exported model; as it was read if unsaid.
    pub export: Option<DType>,
}

impl Default for PrecisionConfig {
    fn default() -> Self {
        Self {
            compute: DType::F32,
            saved_activations: None,
            reduce: DType::F32,
            export: None,
        }
    }
}

/// What backward computes again instead of keeping it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct RecomputeConfig {
    /// Modules of every layer.
    pub modules: Vec<RecomputeModule>,
    /// Whole layers: the first N.
    pub full_layers: usize,
}

/// A module whose inner activations can be computed again.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum RecomputeModule {
    /// Softmax and its products (Korthikanti et al. 2022).
    AttentionCore,
    /// Outputs of norms.
    Norm,
    /// Output of the SwiGLU product.
    MlpActivation,
    /// The same within experts.
    MoeActivation,
}

/// A mixture of experts: what its router is trained by beside the objective's loss. See the handbook's
/// [chapter](crate::manual::experts).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct MoeConfig {
    /// Over which tokens the load is balanced; `global` if unsaid.
    pub load_balancing: Option<LoadBalancing>,
    /// Weight of the load-balancing loss; the model's own if unsaid (`router_aux_loss_coef` where its config sets
    /// `output_router_logits`, else 0). 0 is no such loss.
    pub load_balancing_coefficient: Option<f64>,
    /// Weight of the router's z-loss.
    pub z_loss_coefficient: f64,
    /// How far an expert's selection bias moves after each step, up or down; 0 leaves it.
    pub bias_update_rate: f64,
    /// Whether router weights stay as they are.
    pub frozen_router: bool,
    /// Dtype of the router's logits, softmax and choice: f32 or f64.
    pub router_dtype: DType,
}

impl Default for MoeConfig {
    fn default() -> Self {
        Self {
            load_balancing: None,
            load_balancing_coefficient: None,
            z_loss_coefficient: 0.0,
            bias_update_rate: 0.0,
            frozen_router: false,
            router_dtype: DType::F32,
        }
    }
}

/// The tokens whose load is balanced together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LoadBalancing {
    /// Each sequence by itself: the loss does not depend on how the batch is cut.
    Sequence,
    /// A micro-batch over all data-parallel ranks: the loss depends on the cut.
    Global,
}

/// Device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DeviceConfig {
    /// Host processors.
    #[default]
    Cpu,
    /// NVIDIA GPUs.
    Cuda,
}

/// Checkpoints, under `output/checkpoints`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CheckpointConfig {
    /// Steps between saves, and one after the last step; `null` saves only at a Ctrl-C, or where the model cannot be
    /// written.
    #[schemars(range(min = 1))]
    pub every: Option<u64>,
    /// How many to keep; the oldest go first.
    #[schemars(range(min = 1))]
    pub keep: usize,
    /// Whether training goes on while a checkpoint is written; it is then copied in host memory first, which takes
    /// as many bytes as the checkpoint has (three times the f32 weights, over all ranks).
    pub asynchronous: bool,
    /// `asynchronous`: what a save does that is due while one is still being written.
    pub when_busy: WhenBusy,
}

/// What a save does that is due while one is still being written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum WhenBusy {
    /// Training waits for the one that is being written.
    #[default]
    Wait,
    /// The save that is due is left out, which is told.
    Skip,
}

impl Default for CheckpointConfig {
    fn default() -> Self {
        Self {
            every: None,
            keep: 2,
            asynchronous: false,
            when_busy: WhenBusy::default(),
        }
    }
}

/// What a run tells of itself beside `metrics.jsonl`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct MetricsConfig {
    /// Whether the numbers are written as TensorBoard event files too, under `output/tensorboard`.
    pub tensorboard: bool,
    /// Whether every step says what each rank holds in memory, and what its process does.
    pub memory: bool,
}

/// Validation passes over `data.validation`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ValidationConfig {
    /// Steps between passes; `null` is none.
    #[schemars(range(min = 1))]
    pub every: Option<u64>,
    /// Most sequences of a pass; all if unsaid.
    #[schemars(range(min = 1))]
    pub max_sequences: Option<usize>,
}

fn yes() -> bool {
    true
}

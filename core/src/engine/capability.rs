//! What a backend claims: typed, nested, by default nothing.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::{DType, model::Family};

/// What a backend can do. A request outside it is `Unsupported`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Capability {
    /// Model families it trains.
    pub families: BTreeSet<Family>,
    /// Dtypes it computes in.
    pub compute: Vec<DType>,
    /// Dtypes, beside the one it computes in, in which it keeps activations for backward.
    pub saved_activations: Vec<DType>,
    /// Dtypes it reduces gradients in.
    pub reduce: Vec<DType>,
    /// Kinds of device: `cpu`, `cuda`.
    pub devices: BTreeSet<String>,
    /// Data parallelism.
    pub data_parallel: Option<DataParallel>,
    /// Tensor parallelism.
    pub tensor_parallel: Option<TensorParallel>,
    /// Pipeline parallelism.
    pub pipeline_parallel: Option<PipelineParallel>,
    /// Context parallelism.
    pub context_parallel: Option<ContextParallel>,
    /// Expert parallelism.
    pub expert_parallel: Option<ExpertParallel>,
    /// Recomputation of activations.
    pub recompute: RecomputeCapability,
    /// A mixture of experts: what is trained beside the forward pass that the families say.
    pub moe: Option<Moe>,
    /// Snapshots of weights for reference policies.
    pub snapshots: bool,
    /// Entropy, forward and backward.
    pub entropy: bool,
    /// Log-probs at given ids.
    pub log_probs_at: bool,
    /// A value head.
    pub values: bool,
    /// State that moves to host memory.
    pub offload: bool,
    /// Saving and loading state.
    pub checkpoints: bool,
    /// Exporting the open step's gradients.
    pub export_gradients: bool,
}

/// Data parallelism.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DataParallel {
    /// Largest number of ranks; `None` is unbounded.
    pub max_ranks: Option<usize>,
    /// Whether parameters are sharded between uses.
    pub shards_parameters: bool,
    /// Whether optimizer state is sharded.
    pub shards_optimizer: bool,
    /// Replicas of sharded groups (HSDP).
    pub replicate: bool,
}

/// Tensor parallelism.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorParallel {
    /// Norms and residuals split along the sequence.
    pub sequence_parallel: bool,
    /// Fewer key/value heads than ranks.
    pub replicated_kv_heads: bool,
}

/// Pipeline parallelism.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PipelineParallel {
    /// Several model chunks a rank.
    pub interleaved: bool,
}

/// Context parallelism.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContextParallel {}

/// Expert parallelism.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertParallel {
    /// Tensor parallelism of its own within experts.
    pub expert_tensor: bool,
}

/// A mixture of experts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moe {
    /// The load-balancing loss of each sequence.
    pub sequence_balancing: bool,
    /// The load-balancing loss of a micro-batch over all data-parallel ranks.
    pub global_balancing: bool,
    /// The router's z-loss.
    pub z_loss: bool,
    /// The selection bias of experts, and its update.
    pub expert_bias: bool,
    /// Router weights that stay as they are.
    pub frozen_router: bool,
    /// A router in f64.
    pub router_f64: bool,
}

/// Recomputation of activations in backward.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecomputeCapability {
    /// Chosen modules.
    pub selective: bool,
    /// Whole layers.
    pub full: bool,
}

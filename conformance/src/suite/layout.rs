//! How a case's work is laid out: ranks, micro-batches, recomputation.

use drivetrain_core::{
    DType,
    config::{JobSpec, LoadBalancing, MoeConfig, ParallelConfig, RecomputeConfig, RecomputeModule},
    engine::{Capability, Moe},
    plan::MicrobatchLimit,
};

/// A layout. The default is one rank and one micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// How ranks are arranged.
    pub parallel: ParallelConfig,
    /// The first layers that are computed again in backward.
    pub full_layers: usize,
    /// Modules of every layer that are computed again in backward.
    pub modules: &'static [RecomputeModule],
    /// What is computed in, if not what the suite takes of what a backend claims.
    pub compute: Option<DType>,
    /// What gradients are reduced in, if not f32.
    pub reduce: Option<DType>,
    /// What activations are kept in for backward, if not as they were computed.
    pub saved_activations: Option<DType>,
    /// How much a micro-batch may hold.
    pub limit: MicrobatchLimit,
}

impl Layout {
    /// Number of ranks.
    pub fn num_ranks(&self) -> usize {
        let p = &self.parallel;
        p.data_parallel_size
            * p.tensor_parallel_size
            * p.context_parallel_size
            * p.pipeline_parallel_size
    }
}

impl Default for Layout {
    fn default() -> Self {
        Self::data(1)
    }
}

impl Layout {
    /// Data-parallel ranks, each with one micro-batch.
    pub fn data(ranks: usize) -> Self {
        Self::parallel(ParallelConfig {
            data_parallel_size: ranks,
            ..ParallelConfig::default()
        })
    }

    /// Ranks, each with one micro-batch.
    pub fn parallel(parallel: ParallelConfig) -> Self {
        Self {
            parallel,
            full_layers: 0,
            modules: &[],
            compute: None,
            reduce: None,
            saved_activations: None,
            limit: MicrobatchLimit::All,
        }
    }

    /// With the first layers computed again in backward.
    #[must_use]
    pub fn full_layers(self, full_layers: usize) -> Self {
        Self {
            full_layers,
            ..self
        }
    }

    /// With these modules of every layer computed again in backward.
    #[must_use]
    pub fn modules(self, modules: &'static [RecomputeModule]) -> Self {
        Self { modules, ..self }
    }

    /// Computing in this dtype.
    #[must_use]
    pub fn compute(self, dtype: DType) -> Self {
        Self {
            compute: Some(dtype),
            ..self
        }
    }

    /// Reducing gradients in this dtype.
    #[must_use]
    pub fn reduce(self, dtype: DType) -> Self {
        Self {
            reduce: Some(dtype),
            ..self
        }
    }

    /// With activations kept in this dtype.
    #[must_use]
    pub fn saved_activations(self, dtype: DType) -> Self {
        Self {
            saved_activations: Some(dtype),
            ..self
        }
    }

    /// With micro-batches of this size.
    #[must_use]
    pub fn limit(self, limit: MicrobatchLimit) -> Self {
        Self { limit, ..self }
    }

    /// With micro-batches of this many sequences.
    #[must_use]
    pub fn sequences(self, sequences: usize) -> Self {
        self.limit(MicrobatchLimit::Sequences(sequences))
    }

    /// Writes it into a job, but for the threads of a rank and the micro-batches, which go with the batch.
    pub fn lay_out(&self, job: &mut JobSpec) {
        let config = &mut job.config;
        config.parallel = ParallelConfig {
            threads_per_rank: config.parallel.threads_per_rank,
            ..self.parallel
        };
        let precision = &mut config.precision;
        precision.compute = self.compute.unwrap_or(precision.compute);
        precision.reduce = self.reduce.unwrap_or(precision.reduce);
        precision.saved_activations = self.saved_activations;
        config.recompute = RecomputeConfig {
            modules: self.modules.to_vec(),
            full_layers: self.full_layers,
        };
    }
}

/// Something a backend may claim that only some layouts put to work.
pub(super) struct LayoutClaim {
    pub(super) name: &'static str,
    pub(super) claimed: fn(&Capability) -> bool,
    pub(super) used: fn(&Layout) -> bool,
}

/// All of them: whatever is claimed must be judged by at least one case.
pub(super) const CLAIMS: &[LayoutClaim] = &[
    LayoutClaim {
        name: "data_parallel",
        claimed: |c| c.data_parallel.is_some(),
        used: |l| l.parallel.data_parallel_size > 1,
    },
    LayoutClaim {
        name: "data_parallel.replicate",
        claimed: |c| c.data_parallel.is_some_and(|d| d.replicate),
        used: |l| l.parallel.data_replicate_size > 1,
    },
    LayoutClaim {
        name: "tensor_parallel",
        claimed: |c| c.tensor_parallel.is_some(),
        used: |l| l.parallel.tensor_parallel_size > 1,
    },
    LayoutClaim {
        name: "tensor_parallel.sequence_parallel",
        claimed: |c| c.tensor_parallel.is_some_and(|t| t.sequence_parallel),
        used: |l| l.parallel.sequence_parallel,
    },
    LayoutClaim {
        name: "pipeline_parallel",
        claimed: |c| c.pipeline_parallel.is_some(),
        used: |l| l.parallel.pipeline_parallel_size > 1,
    },
    LayoutClaim {
        name: "pipeline_parallel.interleaved",
        claimed: |c| c.pipeline_parallel.is_some_and(|p| p.interleaved),
        used: |l| l.parallel.virtual_pipeline_size > 1,
    },
    LayoutClaim {
        name: "context_parallel",
        claimed: |c| c.context_parallel.is_some(),
        used: |l| l.parallel.context_parallel_size > 1,
    },
    LayoutClaim {
        name: "expert_parallel",
        claimed: |c| c.expert_parallel.is_some(),
        used: |l| l.parallel.expert_parallel_size > 1,
    },
    LayoutClaim {
        name: "expert_parallel.expert_tensor",
        claimed: |c| c.expert_parallel.is_some_and(|e| e.expert_tensor),
        used: |l| l.parallel.expert_tensor_parallel_size.unwrap_or(1) > 1,
    },
    LayoutClaim {
        name: "recompute.full",
        claimed: |c| c.recompute.full,
        used: |l| l.full_layers > 0,
    },
    LayoutClaim {
        name: "recompute.selective",
        claimed: |c| c.recompute.selective,
        used: |l| !l.modules.is_empty(),
    },
    LayoutClaim {
        name: "compute.bf16",
        claimed: |c| c.compute.contains(&DType::Bf16),
        used: |l| l.compute == Some(DType::Bf16),
    },
    LayoutClaim {
        name: "reduce.bf16",
        claimed: |c| c.reduce.contains(&DType::Bf16),
        used: |l| l.reduce == Some(DType::Bf16),
    },
    LayoutClaim {
        name: "saved_activations.bf16",
        claimed: |c| c.saved_activations.contains(&DType::Bf16),
        used: |l| l.saved_activations == Some(DType::Bf16),
    },
];

/// Something a backend may claim of experts, which only some settings put to work.
pub(super) struct MoeClaim {
    pub(super) name: &'static str,
    pub(super) claimed: fn(&Moe) -> bool,
    pub(super) used: fn(&MoeConfig) -> bool,
}

/// All of them.
pub(super) const MOE_CLAIMS: &[MoeClaim] = &[
    MoeClaim {
        name: "moe.sequence_balancing",
        claimed: |m| m.sequence_balancing,
        used: |m| m.load_balancing == Some(LoadBalancing::Sequence),
    },
    MoeClaim {
        name: "moe.global_balancing",
        claimed: |m| m.global_balancing,
        used: |m| m.load_balancing == Some(LoadBalancing::Global),
    },
    MoeClaim {
        name: "moe.z_loss",
        claimed: |m| m.z_loss,
        used: |m| m.z_loss_coefficient > 0.0,
    },
    MoeClaim {
        name: "moe.expert_bias",
        claimed: |m| m.expert_bias,
        used: |m| m.bias_update_rate > 0.0,
    },
    MoeClaim {
        name: "moe.frozen_router",
        claimed: |m| m.frozen_router,
        used: |m| m.frozen_router,
    },
    MoeClaim {
        name: "moe.router_f64",
        claimed: |m| m.router_f64,
        used: |m| m.router_dtype == DType::F64,
    },
];

//! Declares what the engine can do, and builds.

use std::{collections::BTreeSet, sync::Arc};

use drivetrain_core::{
    DType, Result,
    communicator::Communicator,
    config::JobSpec,
    engine::{
        Backend, Capability, ContextParallel, DataParallel, Engine, ExpertParallel, Moe,
        PipelineParallel, RecomputeCapability, TensorParallel, WeightInit,
    },
    model::Family,
    plan::TrainPlan,
};

use crate::{engine::MegatronEngine, plan};

/// The `megatron` backend.
#[derive(Debug, Clone, Copy, Default)]
pub struct Megatron;

impl Backend for Megatron {
    fn name(&self) -> &str {
        "megatron"
    }

    fn capability(&self) -> Capability {
        Capability {
            families: BTreeSet::from([
                Family::Llama,
                Family::Mistral,
                Family::Qwen2,
                Family::Qwen3,
                Family::Mixtral,
                Family::Qwen3Moe,
            ]),
            compute: vec![DType::F32],
            reduce: vec![DType::F32],
            devices: BTreeSet::from(["cpu".to_owned()]),
            data_parallel: Some(DataParallel {
                shards_optimizer: true,
                ..DataParallel::default()
            }),
            tensor_parallel: Some(TensorParallel {
                sequence_parallel: true,
                replicated_kv_heads: true,
            }),
            pipeline_parallel: Some(PipelineParallel { interleaved: true }),
            expert_parallel: Some(ExpertParallel {
                expert_tensor: true,
            }),
            moe: Some(Moe {
                sequence_balancing: true,
                global_balancing: true,
                z_loss: true,
                expert_bias: true,
                frozen_router: true,
                router_f64: true,
            }),
            context_parallel: Some(ContextParallel {}),
            recompute: RecomputeCapability {
                selective: true,
                full: true,
            },
            snapshots: true,
            entropy: true,
            checkpoints: true,
            export_gradients: true,
            ..Capability::default()
        }
    }

    fn plan(&self, job: &JobSpec) -> Result<TrainPlan> {
        plan::plan(self.name(), job)
    }

    fn build(
        &self,
        plan: &TrainPlan,
        world: Arc<dyn Communicator>,
        init: WeightInit<'_>,
    ) -> Result<Box<dyn Engine>> {
        Ok(Box::new(MegatronEngine::new(plan, &world, init)?))
    }
}

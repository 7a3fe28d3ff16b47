//! Declares what the engine can do, and builds.

use std::{collections::BTreeSet, sync::Arc};

use drivetrain_core::{
    DType, Diagnostic, Result,
    communicator::Communicator,
    config::JobSpec,
    engine::{
        Backend, Capability, ContextParallel, DataParallel, Engine, ExpertParallel, Moe,
        PipelineParallel, RecomputeCapability, TensorParallel, WeightInit,
    },
    model::Family,
    plan::TrainPlan,
};
use drivetrain_kernels::cuda::{CudaError, Unified};

use crate::{device, engine::MegatronEngine, options::Options, plan};

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
            saved_activations: vec![DType::Bf16],
            reduce: vec![DType::F32],
            devices: device::kinds(),
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

    fn options_schema(&self) -> Option<schemars::Schema> {
        Some(schemars::schema_for!(Options))
    }

    fn check(&self, job: &JobSpec) -> Vec<Diagnostic> {
        let faults = device::faults(job);
        faults.into_iter().chain(Options::faults(job)).collect()
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
        MegatronOn(device::gpu).build(plan, world, init)
    }
}

/// [`Megatron`] on devices that the caller opens: of each rank its own, where the job says `device: cuda`. Tests
/// run the engine on an emulated one so.
#[doc(hidden)]
#[derive(Debug, Clone, Copy)]
pub struct MegatronOn(pub fn(usize) -> Result<Unified, CudaError>);

impl Backend for MegatronOn {
    fn name(&self) -> &str {
        Megatron.name()
    }

    fn capability(&self) -> Capability {
        let mut capability = Megatron.capability();
        capability.devices.insert("cuda".to_owned());
        capability
    }

    fn options_schema(&self) -> Option<schemars::Schema> {
        Megatron.options_schema()
    }

    fn check(&self, job: &JobSpec) -> Vec<Diagnostic> {
        Megatron.check(job)
    }

    fn plan(&self, job: &JobSpec) -> Result<TrainPlan> {
        Megatron.plan(job)
    }

    fn build(
        &self,
        plan: &TrainPlan,
        world: Arc<dyn Communicator>,
        init: WeightInit<'_>,
    ) -> Result<Box<dyn Engine>> {
        let processor = device::open(plan, &*world, self.0)?;
        let world = device::connect(plan, world)?;
        Ok(Box::new(MegatronEngine::new(
            plan, processor, &world, init,
        )?))
    }
}

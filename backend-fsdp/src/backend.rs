//! Declares what the engine can do, finds a job's faults, and builds.

use std::{collections::BTreeSet, sync::Arc};

use drivetrain_core::{
    DType, Diagnostic, Error, Result,
    communicator::Communicator,
    config::JobSpec,
    engine::{Backend, Capability, DataParallel, Engine, Moe, RecomputeCapability, WeightInit},
    model::Family,
    plan::TrainPlan,
};

use crate::{engine::FsdpEngine, options::Options, plan};

/// The `fsdp` backend.
#[derive(Debug, Clone, Copy, Default)]
pub struct Fsdp;

impl Backend for Fsdp {
    fn name(&self) -> &str {
        "fsdp"
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
                max_ranks: None,
                shards_parameters: true,
                shards_optimizer: true,
                replicate: true,
            }),
            recompute: RecomputeCapability {
                selective: false,
                full: true,
            },
            moe: Some(Moe {
                sequence_balancing: true,
                global_balancing: true,
                z_loss: true,
                expert_bias: true,
                frozen_router: true,
                router_f64: true,
            }),
            snapshots: true,
            entropy: true,
            log_probs_at: true,
            checkpoints: true,
            export_gradients: true,
            ..Capability::default()
        }
    }

    fn options_schema(&self) -> Option<schemars::Schema> {
        Some(schemars::schema_for!(Options))
    }

    fn check(&self, job: &JobSpec) -> Vec<Diagnostic> {
        let fault = |cause| {
            Diagnostic::error(
                "FSDP-01",
                format!("backends.{}", self.name()),
                cause,
                "the options are: reshard_after_forward (true or false)",
            )
        };
        let options = Options::read(&job.config, self.name());
        options.err().map(fault).into_iter().collect()
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
        let options = Options::read(&plan.config, self.name()).map_err(|cause| {
            Error::new(
                drivetrain_core::ErrorKind::Config,
                "build_engine",
                format!("backends.fsdp: {cause}"),
            )
        })?;
        Ok(Box::new(FsdpEngine::new(plan, options, world, init)?))
    }
}

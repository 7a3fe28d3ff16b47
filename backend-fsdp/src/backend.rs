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

use crate::{
    device::has_cuda,
    engine::FsdpEngine,
    options::{Options, Reshard},
    plan,
};

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
            compute: vec![DType::F32, DType::Bf16],
            reduce: vec![DType::F32, DType::Bf16],
            devices: match has_cuda() {
                true => BTreeSet::from(["cpu".to_owned(), "cuda".to_owned()]),
                false => BTreeSet::from(["cpu".to_owned()]),
            },
            data_parallel: Some(DataParallel {
                max_ranks: None,
                shards_parameters: true,
                shards_optimizer: true,
                replicate: true,
            }),
            recompute: RecomputeCapability {
                selective: true,
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
            offload: true,
            checkpoints: true,
            export_gradients: true,
            ..Capability::default()
        }
    }

    fn options_schema(&self) -> Option<schemars::Schema> {
        Some(schemars::schema_for!(Options))
    }

    fn check(&self, job: &JobSpec) -> Vec<Diagnostic> {
        let path = format!("backends.{}", self.name());
        match Options::read(&job.config, self.name()) {
            Err(cause) => vec![Diagnostic::error(
                "FSDP-01",
                path,
                cause,
                "the options are: reshard_after_forward (true, false or a number of ranks), prefetch (a number of \
                 units), accumulate_unsharded (true or false), cpu_offload (true or false)",
            )],
            Ok(options) => uneven_groups(options, job, path).into_iter().collect(),
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

/// A number of ranks to reshard over that does not divide those of a shard group. What is wrong with these is another
/// rule's.
fn uneven_groups(options: Options, job: &JobSpec, path: String) -> Option<Diagnostic> {
    let num_shards = job.mesh().ok()?.data_shard;
    let Reshard::Group(n) = options.reshard_after_forward else {
        return None;
    };
    let divides = options.reshard_after_forward.over(num_shards).is_some();
    let divisors = (1..=num_shards).filter(|n| num_shards.is_multiple_of(*n));
    let divisors: Vec<_> = divisors.map(|n| n.to_string()).collect();
    (!divides).then(|| {
        Diagnostic::error(
            "FSDP-02",
            format!("{path}.reshard_after_forward"),
            format!("groups of {n} ranks, of the {num_shards} over which parameters are sharded"),
            format!(
                "write `true`, `false` or a divisor: {}",
                divisors.join(", ")
            ),
        )
    })
}

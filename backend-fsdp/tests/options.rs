//! Every option of the engine, against the oracle: the suite's layouts of many ranks, run by engines whose options differ.

use std::{process::ExitCode, sync::Arc};

use drivetrain_conformance::Suite;
use drivetrain_core::{
    Diagnostic, Result,
    communicator::Communicator,
    config::JobSpec,
    engine::{Backend, Capability, Engine, WeightInit},
    plan::TrainPlan,
};
use drivetrain_fsdp::Fsdp;
use serde_json::{Value, json};

/// The backend with options of its own in every job.
#[derive(Debug)]
struct Variant {
    name: &'static str,
    options: Value,
}

impl Variant {
    fn job(&self, job: &JobSpec) -> JobSpec {
        let mut job = job.clone();
        let options = self.options.as_object().expect("a section").clone();
        job.config.backends.insert(Fsdp.name().to_owned(), options);
        job
    }
}

impl Backend for Variant {
    fn name(&self) -> &str {
        self.name
    }

    fn capability(&self) -> Capability {
        Fsdp.capability()
    }

    fn check(&self, job: &JobSpec) -> Vec<Diagnostic> {
        Fsdp.check(&self.job(job))
    }

    fn plan(&self, job: &JobSpec) -> Result<TrainPlan> {
        let plan = Fsdp.plan(&self.job(job))?;
        Ok(TrainPlan {
            backend: self.name.to_owned(),
            ..plan
        })
    }

    fn build(
        &self,
        plan: &TrainPlan,
        world: Arc<dyn Communicator>,
        init: WeightInit<'_>,
    ) -> Result<Box<dyn Engine>> {
        Fsdp.build(plan, world, init)
    }
}

fn main() -> ExitCode {
    let variants = [
        ("fsdp-keep", json!({"reshard_after_forward": false})),
        ("fsdp-groups", json!({"reshard_after_forward": 2})),
        ("fsdp-at-once", json!({"prefetch": 0})),
        (
            "fsdp-far-ahead",
            json!({"prefetch": 3, "reshard_after_forward": 2}),
        ),
        ("fsdp-unsharded", json!({"accumulate_unsharded": true})),
        (
            "fsdp-unsharded-keep",
            json!({"accumulate_unsharded": true, "reshard_after_forward": false}),
        ),
    ];
    let variant = |(name, options)| Arc::new(Variant { name, options }) as Arc<dyn Backend>;
    Suite::new(variants.map(variant).into())
        .groups(&[
            "layouts/dense/ranks4_",
            "layouts/tied/ranks4_",
            "layouts/q3_moe/ranks4_",
            "layouts/bias/recompute3_ranks2_",
            "layouts/q3/replicas2_",
            "layouts/no_layers/ranks4_",
            "both_bf16/q3/",
            "reduce_bf16/dense/replicas2_",
            "compute_bf16/dense/ranks1",
            "uneven/ranks2/rows_of",
            "uneven/ranks3/rows_of",
            "uneven/ranks4/rows_of",
        ])
        .at_least(30)
        .main()
}

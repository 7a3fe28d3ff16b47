//! A job that asks for what the backend does not claim is refused as `Unsupported` before anything is built.

use drivetrain_core::{
    DType, Error, ErrorKind, Result,
    config::{DeviceConfig, JobSpec, LoadBalancing, MoeConfig, RecomputeModule},
    engine::Capability,
    model::Family,
};

use super::{engine_state::not_refused, refusals::any_model, step::Setting};
use crate::{
    fixture::model,
    suite::{Case, Findings, Needs, Subject},
};

/// A wish, whether a capability claims it, and how a job says it.
type Wish = (&'static str, fn(&Capability) -> bool, fn(&mut JobSpec));

const WISHES: [Wish; 23] = [
    (
        "tensor_parallel",
        |c| c.tensor_parallel.is_some(),
        |job| job.config.parallel.tensor_parallel_size = 2,
    ),
    (
        "pipeline_parallel",
        |c| c.pipeline_parallel.is_some(),
        |job| job.config.parallel.pipeline_parallel_size = 2,
    ),
    (
        "context_parallel",
        |c| c.context_parallel.is_some(),
        |job| job.config.parallel.context_parallel_size = 2,
    ),
    (
        "expert_parallel",
        |c| c.expert_parallel.is_some(),
        |job| job.config.parallel.expert_parallel_size = 2,
    ),
    (
        "data_parallel",
        |c| c.data_parallel.is_some(),
        |job| job.config.parallel.data_parallel_size = 2,
    ),
    (
        "replicated_shards",
        |c| c.data_parallel.is_some_and(|d| d.replicate),
        |job| {
            job.config.parallel.data_parallel_size = 2;
            job.config.parallel.data_replicate_size = 2;
        },
    ),
    (
        "cuda",
        |c| c.devices.contains("cuda"),
        |job| job.config.device = DeviceConfig::Cuda,
    ),
    (
        "compute_bf16",
        |c| c.compute.contains(&DType::Bf16),
        |job| job.config.precision.compute = DType::Bf16,
    ),
    (
        "reduce_bf16",
        |c| c.reduce.contains(&DType::Bf16),
        |job| job.config.precision.reduce = DType::Bf16,
    ),
    (
        "saved_activations_bf16",
        |c| c.saved_activations.contains(&DType::Bf16),
        |job| job.config.precision.saved_activations = Some(DType::Bf16),
    ),
    (
        "recompute_layers",
        |c| c.recompute.full,
        |job| job.config.recompute.full_layers = 1,
    ),
    (
        "recompute_modules",
        |c| c.recompute.selective,
        |job| job.config.recompute.modules = vec![RecomputeModule::AttentionCore],
    ),
    (
        "mistral",
        |c| c.families.contains(&Family::Mistral),
        |job| job.model = model("window"),
    ),
    (
        "qwen2",
        |c| c.families.contains(&Family::Qwen2),
        |job| job.model = model("bias"),
    ),
    (
        "qwen3",
        |c| c.families.contains(&Family::Qwen3),
        |job| job.model = model("q3"),
    ),
    (
        "mixtral",
        |c| c.families.contains(&Family::Mixtral),
        |job| job.model = model("mixtral"),
    ),
    (
        "qwen3_moe",
        |c| c.families.contains(&Family::Qwen3Moe),
        |job| job.model = model("q3_moe"),
    ),
    (
        "sequence_balancing",
        |c| c.moe.is_some_and(|m| m.sequence_balancing),
        |job| balanced(job, LoadBalancing::Sequence),
    ),
    (
        "global_balancing",
        |c| c.moe.is_some_and(|m| m.global_balancing),
        |job| balanced(job, LoadBalancing::Global),
    ),
    (
        "z_loss",
        |c| c.moe.is_some_and(|m| m.z_loss),
        |job| with_experts(job).z_loss_coefficient = 0.1,
    ),
    (
        "expert_bias",
        |c| c.moe.is_some_and(|m| m.expert_bias),
        |job| with_experts(job).bias_update_rate = 0.1,
    ),
    (
        "frozen_router",
        |c| c.moe.is_some_and(|m| m.frozen_router),
        |job| with_experts(job).frozen_router = true,
    ),
    (
        "router_f64",
        |c| c.moe.is_some_and(|m| m.router_f64),
        |job| with_experts(job).router_dtype = DType::F64,
    ),
];

fn with_experts(job: &mut JobSpec) -> &mut MoeConfig {
    job.model = model("mixtral");
    &mut job.config.moe
}

fn balanced(job: &mut JobSpec, form: LoadBalancing) {
    let moe = with_experts(job);
    moe.load_balancing = Some(form);
    moe.load_balancing_coefficient = Some(0.1);
}

pub(super) fn cases() -> Vec<Case> {
    let case = |(name, claimed, say): Wish| {
        let needs = Needs {
            lacks: Some((name, claimed)),
            ..Needs::default()
        };
        Case::new(format!("refusals/job_{name}"), needs, move |s, f| {
            refused(say, s, f)
        })
    };
    WISHES.into_iter().map(case).collect()
}

fn refused(say: fn(&mut JobSpec), subject: &Subject, findings: &mut Findings) -> Result<()> {
    let mut job = subject.job(&any_model(subject)?);
    say(&mut job);
    let model = job.model.clone();
    let setting = Setting::new(&model, subject.settings.seed)?;
    let built = subject.run_from(&job, &setting.weights, |_| Ok(()));
    match built.err() {
        None => Err(not_refused("the job")),
        Some(error) if error.kind() == ErrorKind::Unsupported => {
            let says = !error.diagnostics().is_empty();
            findings.fact("refused, with a rule and a remedy", says);
            Ok(())
        }
        Some(error) => {
            let message = format!(
                "refused as {:?} and not as Unsupported: {error}",
                error.kind()
            );
            Err(Error::new(ErrorKind::Parity, "conformance", message))
        }
    }
}

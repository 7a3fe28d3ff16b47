//! Declares what the engine can do, finds a job's faults, and builds.

use std::{collections::BTreeSet, sync::Arc};

use drivetrain_core::{
    DType, Diagnostic, Error, Result, Severity,
    communicator::Communicator,
    config::JobSpec,
    engine::{Backend, Capability, DataParallel, Engine, RecomputeCapability, WeightInit},
    model::{Family, ModelSpec},
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
            ]),
            compute: vec![DType::F32],
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
        let mut faults = Vec::new();
        check_options(self.name(), job, &mut faults);
        check_precision(job, &mut faults);
        check_model(&job.model, &mut faults);
        check_logits_budget(job, &mut faults);
        faults
    }

    fn plan(&self, job: &JobSpec) -> Result<TrainPlan> {
        let faults = self.check(job);
        if faults.iter().any(|f| f.severity == Severity::Error) {
            return Err(Error::diagnosed("plan", faults));
        }
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

fn check_options(backend: &str, job: &JobSpec, faults: &mut Vec<Diagnostic>) {
    if let Err(cause) = Options::read(&job.config, backend) {
        faults.push(Diagnostic::error(
            "FSDP-01",
            format!("backends.{backend}"),
            cause,
            "the options are: reshard_after_forward (true or false)",
        ));
    }
}

fn check_precision(job: &JobSpec, faults: &mut Vec<Diagnostic>) {
    if job.config.precision.reduce != DType::F32 {
        faults.push(Diagnostic::error(
            "FSDP-02",
            "precision.reduce",
            format!(
                "gradients would be reduced in {}",
                job.config.precision.reduce
            ),
            "fsdp reduces gradients in f32: set f32",
        ));
    }
    if let Some(export) = job.config.precision.export
        && !matches!(export, DType::F64 | DType::F32 | DType::Bf16 | DType::F16)
    {
        faults.push(Diagnostic::error(
            "FSDP-03",
            "precision.export",
            format!("weights would be exported as {export}"),
            "set f64, f32, bf16 or f16",
        ));
    }
}

fn check_model(model: &ModelSpec, faults: &mut Vec<Diagnostic>) {
    let ModelSpec {
        num_heads,
        num_kv_heads,
        head_dim,
        ..
    } = *model;
    if head_dim == 0 || head_dim % 2 != 0 {
        faults.push(Diagnostic::error(
            "FSDP-04",
            "model",
            format!("the head dim is {head_dim}"),
            "RoPE turns pairs: it must be even and above 0",
        ));
    }
    if num_kv_heads == 0 || num_heads % num_kv_heads != 0 {
        faults.push(Diagnostic::error(
            "FSDP-05",
            "model",
            format!("{num_heads} query heads do not share {num_kv_heads} key/value heads evenly"),
            "num_key_value_heads must divide num_attention_heads",
        ));
    }
    if model.layers.iter().any(|l| l.sliding_window == Some(0)) {
        faults.push(Diagnostic::error(
            "FSDP-06",
            "model",
            "a layer's sliding window is 0, so that a token would not see itself",
            "sliding_window must be at least 1, or null",
        ));
    }
}

/// A row of logits, and its exponentials beside it where entropy is wanted.
fn check_logits_budget(job: &JobSpec, faults: &mut Vec<Diagnostic>) {
    let row = (job.model.vocab_size * size_of::<f32>() * 2) as u64;
    if job.config.logits_budget_bytes < row {
        faults.push(Diagnostic::error(
            "FSDP-07",
            "logits_budget_bytes",
            format!(
                "{} bytes do not hold the logits of one token and their exponentials",
                job.config.logits_budget_bytes
            ),
            format!(
                "a vocabulary of {} needs at least {row}",
                job.model.vocab_size
            ),
        ));
    }
}

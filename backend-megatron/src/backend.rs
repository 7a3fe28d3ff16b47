//! Declares what the engine can do, finds a job's faults, and builds.

use std::{collections::BTreeSet, sync::Arc};

use drivetrain_core::{
    DType, Diagnostic, Error, Result, Severity,
    communicator::Communicator,
    config::JobSpec,
    engine::{Backend, Capability, DataParallel, Engine, WeightInit},
    model::{Family, ModelSpec},
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
            ]),
            compute: vec![DType::F32],
            devices: BTreeSet::from(["cpu".to_owned()]),
            data_parallel: Some(DataParallel {
                shards_optimizer: true,
                ..DataParallel::default()
            }),
            snapshots: true,
            entropy: true,
            checkpoints: true,
            export_gradients: true,
            ..Capability::default()
        }
    }

    fn check(&self, job: &JobSpec) -> Vec<Diagnostic> {
        let mut faults = Vec::new();
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
        Ok(Box::new(MegatronEngine::new(plan, &world, init)?))
    }
}

fn check_precision(job: &JobSpec, faults: &mut Vec<Diagnostic>) {
    if job.config.precision.reduce != DType::F32 {
        faults.push(Diagnostic::error(
            "MEG-01",
            "precision.reduce",
            format!(
                "gradients would be reduced in {}",
                job.config.precision.reduce
            ),
            "megatron reduces gradients in f32: set f32",
        ));
    }
    if let Some(export) = job.config.precision.export
        && !matches!(export, DType::F64 | DType::F32 | DType::Bf16 | DType::F16)
    {
        faults.push(Diagnostic::error(
            "MEG-02",
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
            "MEG-03",
            "model",
            format!("the head dim is {head_dim}"),
            "RoPE turns pairs: it must be even and above 0",
        ));
    }
    if num_kv_heads == 0 || num_heads % num_kv_heads != 0 {
        faults.push(Diagnostic::error(
            "MEG-04",
            "model",
            format!("{num_heads} query heads do not share {num_kv_heads} key/value heads evenly"),
            "num_key_value_heads must divide num_attention_heads",
        ));
    }
    if model.layers.iter().any(|l| l.sliding_window == Some(0)) {
        faults.push(Diagnostic::error(
            "MEG-05",
            "model",
            "a layer's sliding window is 0, so that a token would not see itself",
            "sliding_window must be at least 1, or null",
        ));
    }
}

fn check_logits_budget(job: &JobSpec, faults: &mut Vec<Diagnostic>) {
    let row = (job.model.vocab_size * size_of::<f32>()) as u64;
    if job.config.logits_budget_bytes < row {
        faults.push(Diagnostic::error(
            "MEG-06",
            "logits_budget_bytes",
            format!(
                "{} bytes do not hold the logits of one token",
                job.config.logits_budget_bytes
            ),
            format!(
                "a vocabulary of {} needs at least {row}",
                job.model.vocab_size
            ),
        ));
    }
}

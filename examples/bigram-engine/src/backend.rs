//! What the engine is called, what it claims, and the one rule it adds.

use std::{collections::BTreeSet, sync::Arc};

use drivetrain_core::{
    DType, Diagnostic, Result,
    communicator::Communicator,
    config::JobSpec,
    engine::{Backend, Capability, Engine, WeightInit},
    model::Family,
    plan::{PipelineKind, PlannedOp, TrainPlan, stages},
    weights::SeededWeights,
};

use crate::{engine::BigramEngine, model::Bigram};

/// Tokens that the plan's operations are counted for.
const REFERENCE_TOKENS: usize = 1024;

/// Trains models without layers.
#[derive(Debug, Clone, Copy, Default)]
pub struct BigramBackend;

impl Backend for BigramBackend {
    fn name(&self) -> &str {
        "bigram"
    }

    fn capability(&self) -> Capability {
        Capability {
            families: BTreeSet::from([Family::Llama]),
            compute: vec![DType::F32],
            reduce: vec![DType::F32],
            devices: BTreeSet::from(["cpu".to_owned()]),
            export_gradients: true,
            ..Capability::default()
        }
    }

    fn check(&self, job: &JobSpec) -> Vec<Diagnostic> {
        let layers = job.model.num_layers();
        if layers == 0 {
            return Vec::new();
        }
        vec![Diagnostic::error(
            "BIGRAM-01",
            "model",
            format!("the model has {layers} layers"),
            "choose a model whose num_hidden_layers is 0",
        )]
    }

    fn plan(&self, job: &JobSpec) -> Result<TrainPlan> {
        let (model, tokens) = (&job.model, REFERENCE_TOKENS);
        Ok(TrainPlan {
            backend: self.name().to_owned(),
            mesh: job.mesh()?,
            model: model.clone(),
            config: job.config.clone(),
            parameters: model.parameters(),
            stages: stages(0, &job.config.parallel)?,
            schedule: PipelineKind::from_config(&job.config.parallel),
            ops: vec![PlannedOp {
                kind: "gemm".to_owned(),
                module: "head".to_owned(),
                m: tokens,
                n: model.vocab_size,
                k: model.hidden_size,
                saved_bytes: 4 * (tokens * model.vocab_size) as u64,
            }],
            collectives: Vec::new(),
            reference_tokens: tokens,
        })
    }

    fn build(
        &self,
        plan: &TrainPlan,
        world: Arc<dyn Communicator>,
        init: WeightInit<'_>,
    ) -> Result<Box<dyn Engine>> {
        let model = match init {
            WeightInit::Seed(seed) => Bigram::read(plan, &SeededWeights::new(&plan.model, seed))?,
            WeightInit::Source(source) => Bigram::read(plan, source)?,
            WeightInit::Deferred => Bigram::zeros(plan),
        };
        Ok(Box::new(BigramEngine::new(plan.clone(), world, model)))
    }
}

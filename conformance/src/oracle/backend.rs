//! Builds the reference and says what it can do.

use std::{collections::BTreeSet, sync::Arc};

use drivetrain_core::{
    DType, Result,
    communicator::Communicator,
    config::JobSpec,
    engine::{
        Backend, Capability, ContextParallel, DataParallel, Engine, ExpertParallel, Moe,
        PipelineParallel, RecomputeCapability, TensorParallel, WeightInit,
    },
    model::{Family, ParameterSpec},
    moe::ExpertBias,
    plan::TrainPlan,
    weights::SeededWeights,
};

use super::{
    defect::Defect,
    engine::ReferenceEngine,
    matrix::Matrix,
    model::{Parameters, Policy},
    weights,
};

/// The word after `backend:`.
pub(super) const NAME: &str = "reference";

/// The f64 oracle as an engine: slow, plain, and right. Weights, moments and reductions are f64 whatever the
/// job's dtypes say, since it stands for the exact value of what they round; only where it stands for an engine does it
/// keep activations in bf16 as the job says.
#[derive(Debug, Clone, Copy, Default)]
pub struct ReferenceBackend {
    defect: Option<Defect>,
    replicated: bool,
}

impl ReferenceBackend {
    /// The oracle.
    pub fn new() -> Self {
        Self::default()
    }

    /// The oracle on every axis: each model-parallel peer computes the whole of its share, and recomputation changes
    /// nothing. It stands for an engine that splits the model, to test a suite of such.
    pub fn replicated() -> Self {
        Self {
            defect: None,
            replicated: true,
        }
    }

    /// The same with one thing done wrong, to test a suite that should notice.
    pub fn with_defect(defect: Defect) -> Self {
        Self {
            defect: Some(defect),
            replicated: true,
        }
    }
}

impl Backend for ReferenceBackend {
    fn name(&self) -> &str {
        NAME
    }

    fn is_exact(&self) -> bool {
        true
    }

    fn capability(&self) -> Capability {
        let own = Capability {
            families: BTreeSet::from([
                Family::Llama,
                Family::Mistral,
                Family::Qwen2,
                Family::Qwen3,
                Family::Mixtral,
                Family::Qwen3Moe,
            ]),
            compute: vec![DType::F64, DType::F32],
            saved_activations: vec![DType::Bf16],
            reduce: vec![DType::F64, DType::F32],
            devices: BTreeSet::from(["cpu".to_owned()]),
            data_parallel: Some(DataParallel::default()),
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
        };
        if !self.replicated {
            return own;
        }
        Capability {
            data_parallel: Some(DataParallel {
                replicate: true,
                ..DataParallel::default()
            }),
            tensor_parallel: Some(TensorParallel {
                sequence_parallel: true,
                replicated_kv_heads: true,
            }),
            pipeline_parallel: Some(PipelineParallel { interleaved: true }),
            context_parallel: Some(ContextParallel {}),
            expert_parallel: Some(ExpertParallel {
                expert_tensor: true,
            }),
            recompute: RecomputeCapability {
                selective: true,
                full: true,
            },
            ..own
        }
    }

    fn plan(&self, job: &JobSpec) -> Result<TrainPlan> {
        super::plan::plan(job)
    }

    fn build(
        &self,
        plan: &TrainPlan,
        world: Arc<dyn Communicator>,
        init: WeightInit<'_>,
    ) -> Result<Box<dyn Engine>> {
        let specs = &plan.parameters;
        let weights = match init {
            WeightInit::Source(source) => weights::read(specs, source)?,
            WeightInit::Seed(seed) => weights::read(specs, &SeededWeights::new(&plan.model, seed))?,
            WeightInit::Deferred => zeros(specs),
        };
        let policy = Policy {
            weights,
            bias: ExpertBias::zeros(&plan.model),
        };
        let mut plan = plan.clone();
        if !self.replicated {
            plan.config.precision.saved_activations = None;
        }
        let engine = ReferenceEngine::new(plan, world, policy, self.defect)?;
        Ok(Box::new(engine))
    }
}

fn zeros(specs: &[ParameterSpec]) -> Parameters {
    let one = |spec: &ParameterSpec| {
        let matrix = Matrix::with_shape(&spec.shape, vec![0.0; spec.num_elements()]);
        (spec.name.clone(), Arc::new(matrix))
    };
    specs.iter().map(one).collect()
}

//! The backend under test, and how a case runs it on some ranks.

use std::{
    collections::BTreeMap,
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use drivetrain_core::{
    DType, Result,
    batch::Batch,
    communicator::{Communicator, Intercepted},
    config::{JobConfig, JobSpec, MoeConfig},
    engine::{Backend, Engine, Guarded, ScoreRequest, WeightInit, build_engine},
    launch::run_ranks,
    model::ModelSpec,
    objective::TokenOutputs,
    plan::{MicrobatchLimit, TrainPlan, plan_microbatches},
};
use serde_json::json;

use super::faulty::Fault;
use crate::communicator::Launch;

/// How long ranks may wait for each other in a case.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Settings of a run of the suite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Key of generated models and batches.
    pub seed: u64,
    /// Number of generated cases for each property.
    pub generated: u32,
    /// Whether every one of many cases runs, not a sample of [`SAMPLE`](super::SAMPLE).
    pub all: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            seed: 20_250_101,
            generated: 12,
            all: false,
        }
    }
}

/// How the ranks of a case are started: as threads, unless said otherwise.
#[derive(Clone)]
pub struct Transport(Launch);

impl Transport {
    /// Ranks that this starts.
    pub fn new(launch: Launch) -> Self {
        Self(launch)
    }
}

impl Default for Transport {
    fn default() -> Self {
        Self(Arc::new(|world_size, timeout, body| {
            run_ranks(world_size, timeout, body).map(drop)
        }))
    }
}

impl fmt::Debug for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Transport")
    }
}

/// The backend under test.
#[derive(Debug, Clone)]
pub struct Subject {
    /// The backend.
    pub backend: Arc<dyn Backend>,
    /// Settings of this run of the suite.
    pub settings: Settings,
    /// What its jobs say of experts.
    pub moe: MoeConfig,
    /// How its ranks are started.
    pub transport: Transport,
}

/// One rank of a running engine.
#[derive(Debug)]
pub struct Rank {
    /// The engine, behind its guard.
    pub engine: Guarded,
    /// What the engine was built from.
    pub plan: TrainPlan,
    /// Which data-parallel share it gets.
    pub data_index: usize,
    /// All ranks, of whose operations none is lost.
    pub world: Arc<dyn Communicator>,
    /// The engine's sight of them; not armed.
    pub fault: Arc<Fault>,
}

impl Rank {
    /// This rank's share of a global batch, cut into micro-batches.
    ///
    /// # Errors
    /// None but a defect's.
    pub fn share(&self, global: &Batch, limit: MicrobatchLimit) -> Result<Batch> {
        self.plan.cut(global, limit)?.share(global, self.data_index)
    }

    /// The whole of a batch, for every rank to compute, in a number of micro-batches that the plan's schedule takes.
    ///
    /// # Errors
    /// None but a defect's.
    pub fn whole(&self, batch: &Batch) -> Result<Batch> {
        let multiple_of = self.plan.schedule.multiple_of(self.plan.mesh.pipeline);
        let (lengths, groups) = (batch.lengths(), batch.groups());
        plan_microbatches(&lengths, groups, 1, MicrobatchLimit::All, multiple_of)?.share(batch, 0)
    }

    /// Outputs of every token of a global batch, in its order, that the ranks compute together.
    ///
    /// # Errors
    /// The engine's.
    pub fn score(
        &mut self,
        global: &Batch,
        limit: MicrobatchLimit,
        request: &ScoreRequest,
    ) -> Result<TokenOutputs> {
        let cut = self.plan.cut(global, limit)?;
        let own = self
            .engine
            .forward(&cut.share(global, self.data_index)?, request)?;
        cut.gather(global, &own, &self.plan.mesh, &*self.world)
    }
}

impl Subject {
    /// A backend with default settings.
    pub fn new(backend: impl Backend + 'static) -> Self {
        Self {
            backend: Arc::new(backend),
            settings: Settings::default(),
            moe: MoeConfig::default(),
            transport: Transport::default(),
        }
    }

    /// The same backend, with jobs that say this of experts.
    #[must_use]
    pub fn with_moe(&self, moe: MoeConfig) -> Self {
        Self {
            moe,
            ..self.clone()
        }
    }

    /// Another backend with the same settings.
    #[must_use]
    pub fn other(&self, backend: Arc<dyn Backend>) -> Self {
        Self {
            backend,
            ..self.clone()
        }
    }

    /// The dtype it computes in: f32 if it claims that, else the first it claims.
    pub fn compute(&self) -> DType {
        let claimed = self.backend.capability().compute;
        let f32 = claimed.iter().find(|&&d| d == DType::F32);
        f32.or(claimed.first()).copied().unwrap_or(DType::F32)
    }

    /// A job of this backend for a model; cases change its settings.
    pub fn job(&self, model: &ModelSpec) -> JobSpec {
        let mut config: JobConfig = serde_json::from_value(json!({
            "model": "conformance",
            "backend": self.backend.name(),
            "steps": 100,
            "output": "conformance",
            "data": {"train": "conformance.jsonl"},
            "batch": {"global_batch_size": 4},
            // Cases run side by side, and some libraries keep the number of threads for the whole process: with one
            // thread each, bits cannot depend on the neighbours.
            "parallel": {"threads_per_rank": 1},
        }))
        .expect("these keys are the required ones of a job");
        config.precision.compute = self.compute();
        config.moe = self.moe;
        JobSpec {
            config,
            model: model.clone(),
        }
    }

    /// Runs `body` on every rank of the job, each with its engine, and returns what each returned.
    ///
    /// # Errors
    /// Those of the plan, of building, and of `body`: the first cause.
    pub fn run<T: Send>(
        &self,
        job: &JobSpec,
        init: impl Fn() -> WeightInit<'static> + Sync,
        body: impl Fn(&mut Rank) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        self.run_with(job, &init, &body)
    }

    /// Runs as [`Self::run`], from weights.
    ///
    /// # Errors
    /// As there.
    pub fn run_from<T: Send>(
        &self,
        job: &JobSpec,
        source: &dyn drivetrain_core::weights::WeightSource,
        body: impl Fn(&mut Rank) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        self.run_with(job, &|| WeightInit::Source(source), &body)
    }

    fn run_with<'a, T: Send>(
        &self,
        job: &JobSpec,
        init: &(dyn Fn() -> WeightInit<'a> + Sync),
        body: &(dyn Fn(&mut Rank) -> Result<T> + Sync),
    ) -> Result<Vec<T>> {
        let mesh = job.mesh()?;
        let outcomes = Mutex::new(BTreeMap::new());
        let Transport(launch) = &self.transport;
        launch(mesh.world_size(), TIMEOUT, &|world| {
            let fault = Arc::new(Fault::new(world.clone()));
            let intercepted = Intercepted::new(world.clone(), fault.clone());
            let (engine, plan) = build_engine(&*self.backend, job, Arc::new(intercepted), init())?;
            let mut rank = Rank {
                data_index: plan.mesh.data_index(world.rank()),
                engine,
                plan,
                world,
                fault,
            };
            let number = rank.world.rank();
            let outcome = body(&mut rank)?;
            let mut outcomes = outcomes.lock().unwrap_or_else(PoisonError::into_inner);
            outcomes.insert(number, outcome);
            Ok(())
        })?;
        let outcomes = outcomes.into_inner();
        Ok(outcomes
            .unwrap_or_else(PoisonError::into_inner)
            .into_values()
            .collect())
    }
}

//! Wraps every engine: refuses wrong call order, unclaimed requests and unfit batches before they reach it.

use std::{collections::BTreeSet, sync::Arc};

use super::{
    Capability, Engine, ForwardBackwardReport, MemoryReport, OptimReport, Residency, ScoreRequest,
    StepOptions, Weights,
};
use crate::{
    Error, ErrorKind, Result,
    batch::{Batch, BatchTotals},
    checkpoint::{SaveHandle, StateReader, StateWriter, check_state},
    communicator::{Communicator, Work},
    mesh::DeviceMesh,
    model::ParameterSpec,
    objective::{Checked, Objective, TokenOutputs},
    trace,
    weights::{WeightSink, WeightSource, check_shapes},
};

/// What the guard holds batches, weights and state against.
#[derive(Debug, Clone, PartialEq)]
pub struct GuardOptions {
    /// V: token ids are below it.
    pub vocab_size: usize,
    /// Longest sequence in tokens.
    pub max_length: usize,
    /// The model's parameters, which what is read has to fit.
    pub parameters: Vec<ParameterSpec>,
    /// How the ranks are arranged: which of them get the same share.
    pub mesh: DeviceMesh,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Idle,
    /// Gradients have been accumulated.
    Open,
    /// A load failed half-way: only another load helps.
    Unloaded,
    /// A rank was lost after the commit point.
    Poisoned,
}

/// An engine behind its guard. The one way to hold an engine.
#[derive(Debug)]
pub struct Guarded {
    inner: Box<dyn Engine>,
    world: Arc<dyn Communicator>,
    name: String,
    capability: Capability,
    options: GuardOptions,
    state: State,
    tags: BTreeSet<String>,
}

impl Guarded {
    /// Wraps this rank's engine of `world`, of the backend with this name and capability.
    pub fn new(
        inner: Box<dyn Engine>,
        world: Arc<dyn Communicator>,
        name: impl Into<String>,
        capability: Capability,
        options: GuardOptions,
    ) -> Self {
        Self {
            inner,
            world,
            name: name.into(),
            capability,
            options,
            state: State::Idle,
            tags: BTreeSet::new(),
        }
    }

    fn unsupported(&self, operation: &'static str, what: &str) -> Error {
        Error::new(
            ErrorKind::Unsupported,
            operation,
            format!("the engine does not claim {what}"),
        )
        .with("backend", &self.name)
        .help("choose another backend, or do without; `drivetrain doctor` lists what each claims")
    }

    fn claim(&self, operation: &'static str, what: &str, claimed: bool) -> Result<()> {
        if claimed {
            Ok(())
        } else {
            Err(self.unsupported(operation, what))
        }
    }

    fn alive(&self, operation: &'static str) -> Result<()> {
        match self.state {
            State::Idle | State::Open => Ok(()),
            State::Unloaded => Err(self.order(
                operation,
                "a load failed and left no sound state",
                "load_state",
            )),
            State::Poisoned => Err(Error::new(
                ErrorKind::Poisoned,
                operation,
                "a rank was lost after the step's commit point: ranks may hold different weights",
            )
            .with("backend", &self.name)
            .help("end the job and resume from its last checkpoint")),
        }
    }

    fn closed(&self, operation: &'static str) -> Result<()> {
        self.alive(operation)?;
        match self.state {
            State::Open => Err(self.order(
                operation,
                "a step is open: gradients have been accumulated",
                "optim_step, zero_grad or abort first",
            )),
            _ => Ok(()),
        }
    }

    fn open(&self, operation: &'static str) -> Result<()> {
        self.alive(operation)?;
        match self.state {
            State::Open => Ok(()),
            _ => Err(self.order(operation, "no step is open", "forward_backward first")),
        }
    }

    fn order(&self, operation: &'static str, message: &str, expected: &str) -> Error {
        Error::new(ErrorKind::CallOrder, operation, message)
            .with("backend", &self.name)
            .with("expected", expected)
    }

    fn known(&self, operation: &'static str, weights: &Weights) -> Result<()> {
        match weights {
            Weights::Policy => Ok(()),
            Weights::Tag(tag) if self.tags.contains(tag) => Ok(()),
            Weights::Tag(tag) => {
                Err(
                    Error::new(ErrorKind::Config, operation, "no snapshot has this tag")
                        .with("found", tag)
                        .with("expected", format!("one of {:?}", self.tags))
                        .help("call snapshot(tag) or import_weights into it first"),
                )
            }
        }
    }

    fn temperature(&self, operation: &'static str, temperature: f64) -> Result<()> {
        if super::is_temperature(temperature) {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Config,
            operation,
            "the temperature must be above 0 and finite, as f32 too",
        )
        .with("found", temperature))
    }

    fn fits(&self, operation: &'static str, batch: &Batch) -> Result<()> {
        for s in 0..batch.num_sequences() {
            let range = batch.sequence(s);
            if range.len() > self.options.max_length {
                return Err(Error::new(
                    ErrorKind::Data,
                    operation,
                    "a sequence is longer than the limit",
                )
                .with("sequence", s)
                .with("found", format!("{} tokens", range.len()))
                .with("expected", format!("at most {}", self.options.max_length)));
            }
            let ids = &batch.tokens()[range];
            if let Some(at) = ids
                .iter()
                .position(|&id| id as usize >= self.options.vocab_size)
            {
                return Err(Error::new(
                    ErrorKind::Data,
                    operation,
                    "a token id is outside the vocabulary",
                )
                .with("sequence", s)
                .with("position", at)
                .with("found", ids[at])
                .with("expected", format!("below {}", self.options.vocab_size)));
            }
        }
        Ok(())
    }

    /// The ids of a column are ids of the vocabulary.
    fn ids(&self, operation: &'static str, batch: &Batch, column: Option<&str>) -> Result<()> {
        let Some(column) = column else { return Ok(()) };
        let (ids, width) = batch.token_ids(column)?;
        let inside = |&id: &i64| usize::try_from(id).is_ok_and(|id| id < self.options.vocab_size);
        match ids.iter().position(|id| !inside(id)) {
            None => Ok(()),
            Some(at) => Err(Error::new(
                ErrorKind::Data,
                operation,
                "an id of a column is outside the vocabulary",
            )
            .with("column", column)
            .with("token", at / width)
            .with("found", ids[at])
            .with(
                "expected",
                format!("0 or more, below {}", self.options.vocab_size),
            )),
        }
    }

    fn columns(&self, batch: &Batch, objective: &dyn Objective) -> Result<()> {
        for name in &objective.requires().columns {
            if batch.column(name).is_none() {
                let found: Vec<&str> = batch.columns().map(|(n, _)| n).collect();
                return Err(Error::new(
                    ErrorKind::Data,
                    "forward_backward",
                    "the objective needs a column",
                )
                .with("objective", objective.name())
                .with("expected", name)
                .with("found", format!("{found:?}")));
            }
        }
        Ok(())
    }

    /// Ranks cut their shares into equal numbers of micro-batches, and model-parallel peers have the same share:
    /// else collectives would not match, or would add what does not belong together.
    fn alike(&self, operation: &'static str, batch: &Batch) -> Result<()> {
        let ranks = self.world.world_size();
        if ranks == 1 {
            return Ok(());
        }
        let own = [batch.num_microbatches() as i64, batch.fingerprint() as i64];
        let mut all = vec![0i64; 2 * ranks];
        self.world
            .all_gather(own.as_slice().into(), (&mut all).into(), &vec![2; ranks])
            .and_then(Work::wait)?;
        let fault = |message: &str, found: String, remedy: &str| {
            Err(Error::new(ErrorKind::Data, operation, message)
                .with("found", found)
                .help(remedy))
        };
        let counts: Vec<i64> = all.iter().copied().step_by(2).collect();
        if counts.iter().any(|count| *count != counts[0]) {
            let message = "ranks cut their shares into different numbers of micro-batches";
            let remedy = "cut the global batch with TrainPlan::cut, on every rank alike";
            return fault(message, format!("{counts:?}, by rank"), remedy);
        }
        let mesh = &self.options.mesh;
        for rank in 0..ranks {
            let leader = (0..rank).find(|&r| mesh.data_index(r) == mesh.data_index(rank));
            if let Some(leader) = leader.filter(|&r| all[2 * r + 1] != all[2 * rank + 1]) {
                let message = "model-parallel peers were given different shares";
                let found = format!("another share on rank {rank} than on rank {leader}");
                return fault(
                    message,
                    found,
                    "pass the share of the mesh's data_index(rank)",
                );
            }
        }
        Ok(())
    }

    /// Has the engine drop the open step of a call that failed. The first cause is what the caller gets, even
    /// where that fails too.
    fn dropped_if_failed<T>(&mut self, result: Result<T>) -> Result<T> {
        let result = match result {
            Ok(value) => Ok(value),
            Err(cause) => Err(match self.inner.abort() {
                Ok(()) => cause,
                Err(error) => cause.with("abort", error.message()),
            }),
        };
        self.note(result)
    }

    /// Notes a failure's effect on the state.
    fn note<T>(&mut self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result
            && error.kind() == ErrorKind::Poisoned
        {
            self.state = State::Poisoned;
        }
        result
    }
}

impl Engine for Guarded {
    fn forward_backward(
        &mut self,
        batch: &Batch,
        objective: &dyn Objective,
        totals: &BatchTotals,
    ) -> Result<ForwardBackwardReport> {
        const OPERATION: &str = "forward_backward";
        self.alive(OPERATION)?;
        let requires = objective.requires();
        self.temperature(OPERATION, requires.temperature)?;
        self.claim(
            OPERATION,
            "entropy",
            self.capability.entropy || !requires.entropy,
        )?;
        self.claim(
            OPERATION,
            "a value head",
            self.capability.values || !requires.value,
        )?;
        let at = requires.log_probs_at.is_none() || self.capability.log_probs_at;
        self.claim(OPERATION, "log-probs at given ids", at)?;
        let fit = self
            .fits(OPERATION, batch)
            .and_then(|()| self.columns(batch, objective))
            .and_then(|()| self.ids(OPERATION, batch, requires.log_probs_at.as_deref()));
        self.world.agree(OPERATION, fit)?;
        self.alike(OPERATION, batch)?;
        let _phase = trace::phase(OPERATION);
        let result = self
            .inner
            .forward_backward(batch, &Checked(objective), totals);
        self.state = match &result {
            Ok(_) => State::Open,
            Err(_) => State::Idle,
        };
        self.dropped_if_failed(result)
    }

    fn forward(&mut self, batch: &Batch, request: &ScoreRequest) -> Result<TokenOutputs> {
        const OPERATION: &str = "forward";
        self.alive(OPERATION)?;
        self.known(OPERATION, &request.weights)?;
        self.temperature(OPERATION, request.temperature)?;
        self.claim(
            OPERATION,
            "entropy",
            self.capability.entropy || !request.entropy,
        )?;
        let at = request.log_probs_at.is_none() || self.capability.log_probs_at;
        self.claim(OPERATION, "log-probs at given ids", at)?;
        let fit = self
            .fits(OPERATION, batch)
            .and_then(|()| self.ids(OPERATION, batch, request.log_probs_at.as_deref()));
        self.world.agree(OPERATION, fit)?;
        self.alike(OPERATION, batch)?;
        let _phase = trace::phase(OPERATION);
        let result = self.inner.forward(batch, request);
        self.note(result)
    }

    fn optim_step(&mut self, options: &StepOptions) -> Result<OptimReport> {
        self.open("optim_step")?;
        for (name, value) in [
            ("learning_rate", options.learning_rate),
            ("gradient_divisor", options.gradient_divisor),
        ] {
            let sound = value.is_none_or(|v| v.is_finite() && v >= 0.0);
            if !sound || (name == "gradient_divisor" && value == Some(0.0)) {
                return Err(Error::new(
                    ErrorKind::Config,
                    "optim_step",
                    "the value cannot be used",
                )
                .with("option", name)
                .with("found", format!("{value:?}")));
            }
        }
        let _phase = trace::phase("optim_step");
        let result = self.inner.optim_step(options);
        // Whatever happened, the step is over: committed, skipped, or failed before the commit point.
        self.state = State::Idle;
        self.dropped_if_failed(result)
    }

    fn zero_grad(&mut self) -> Result<()> {
        self.alive("zero_grad")?;
        self.state = State::Idle;
        let result = self.inner.zero_grad();
        self.note(result)
    }

    fn abort(&mut self) -> Result<()> {
        self.alive("abort")?;
        self.state = State::Idle;
        let result = self.inner.abort();
        self.note(result)
    }

    fn step(&self) -> u64 {
        self.inner.step()
    }

    fn export_weights(&mut self, weights: &Weights, sink: &mut dyn WeightSink) -> Result<()> {
        self.alive("export_weights")?;
        self.known("export_weights", weights)?;
        let result = self.inner.export_weights(weights, sink);
        self.note(result)
    }

    fn export_gradients(&mut self, sink: &mut dyn WeightSink) -> Result<()> {
        self.claim(
            "export_gradients",
            "exporting gradients",
            self.capability.export_gradients,
        )?;
        self.open("export_gradients")?;
        let result = self.inner.export_gradients(sink);
        self.note(result)
    }

    fn import_weights(&mut self, weights: &Weights, source: &dyn WeightSource) -> Result<()> {
        self.closed("import_weights")?;
        if let Weights::Tag(_) = weights {
            self.claim("import_weights", "snapshots", self.capability.snapshots)?;
        }
        let fit = check_shapes(source, &self.options.parameters);
        self.world.agree("import_weights", fit)?;
        let result = self.inner.import_weights(weights, source);
        self.note(result)?;
        if let Weights::Tag(tag) = weights {
            self.tags.insert(tag.clone());
        }
        Ok(())
    }

    fn save_state(&mut self, writer: Box<dyn StateWriter>) -> Result<SaveHandle> {
        self.claim("save_state", "checkpoints", self.capability.checkpoints)?;
        self.closed("save_state")?;
        let _phase = trace::phase("save_state");
        let result = self.inner.save_state(writer);
        self.note(result)
    }

    fn load_state(&mut self, reader: &dyn StateReader) -> Result<()> {
        self.claim("load_state", "checkpoints", self.capability.checkpoints)?;
        if self.state != State::Unloaded {
            self.closed("load_state")?;
        }
        let bias = self.capability.moe.is_some_and(|m| m.expert_bias);
        let biased = crate::moe::ExpertBias::is_saved(reader);
        self.claim("load_state", "a selection bias of experts", bias || !biased)?;
        let fit = check_state(reader, &self.options.parameters);
        self.world.agree("load_state", fit)?;
        self.state = State::Unloaded;
        // Where one rank's load fails, no rank has a sound state.
        let result = self.inner.load_state(reader);
        let result = self.world.agree("load_state", result);
        self.note(result)?;
        self.state = State::Idle;
        Ok(())
    }

    fn snapshot(&mut self, tag: &str) -> Result<()> {
        self.claim("snapshot", "snapshots", self.capability.snapshots)?;
        self.alive("snapshot")?;
        let result = self.inner.snapshot(tag);
        self.note(result)?;
        self.tags.insert(tag.to_owned());
        Ok(())
    }

    fn drop_snapshot(&mut self, tag: &str) -> Result<()> {
        self.alive("drop_snapshot")?;
        self.known("drop_snapshot", &Weights::Tag(tag.to_owned()))?;
        let result = self.inner.drop_snapshot(tag);
        self.note(result)?;
        self.tags.remove(tag);
        Ok(())
    }

    fn set_residency(&mut self, residency: Residency) -> Result<()> {
        let claimed = self.capability.offload || residency == Residency::Device;
        self.claim("set_residency", "offloading", claimed)?;
        self.closed("set_residency")?;
        let result = self.inner.set_residency(residency);
        self.note(result)
    }

    fn memory(&self) -> MemoryReport {
        self.inner.memory()
    }
}

//! One `forward_backward`: every micro-batch through this rank's chunks and back, in the order of the schedule.

use std::collections::BTreeMap;

use drivetrain_core::{
    Result,
    engine::ForwardBackwardReport,
    plan::{PipelineAction, PipelineSchedule},
};
use drivetrain_kernels::Cpu;

use crate::{
    data_parallel::Reduction,
    microbatch::{Goal, HeadState, Microbatch},
    model::{Model, missing},
    modules::{Context, RopeTables, SavedBlock},
    ranks::Ranks,
    weights::Buffers,
    workspace::{Buffer, Workspace},
};

/// What a pass computes with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Means<'a> {
    pub(crate) model: &'a Model,
    pub(crate) params: &'a Buffers,
    pub(crate) cpu: Cpu,
    pub(crate) workspace: &'a Workspace,
    pub(crate) rope: &'a RopeTables,
    pub(crate) ranks: &'a Ranks,
}

/// A micro-batch and a chunk of this rank.
type At = (usize, usize);

/// A pass under way.
#[derive(Debug)]
pub(crate) struct Pass<'a> {
    means: Means<'a>,
    goal: Goal<'a>,
    microbatches: &'a [Microbatch],
    grads: &'a mut Buffers,
    reduction: Reduction<'a>,
    /// Outputs of chunks that wait to be sent, and inputs that came.
    activations: BTreeMap<At, Buffer>,
    /// Likewise of gradients.
    gradients: BTreeMap<At, Buffer>,
    open: BTreeMap<At, Open>,
    report: ForwardBackwardReport,
    /// The first failure of the objective.
    outcome: Result<()>,
}

/// A micro-batch between its forward and its backward through a chunk.
#[derive(Debug)]
struct Open {
    saved: Vec<SavedBlock>,
    head: Option<HeadState>,
}

impl<'a> Means<'a> {
    /// What the modules see of a micro-batch.
    pub(crate) fn context(&self, microbatch: &'a Microbatch) -> Context<'a> {
        Context {
            cpu: self.cpu,
            workspace: self.workspace,
            packed: &microbatch.packed,
            rope: self.rope,
            ranks: self.ranks,
            accumulate: microbatch.accumulate,
        }
    }
}

impl<'a> Pass<'a> {
    /// Nothing done yet.
    pub(crate) fn new(
        means: Means<'a>,
        goal: Goal<'a>,
        microbatches: &'a [Microbatch],
        grads: &'a mut Buffers,
        reduction: Reduction<'a>,
    ) -> Self {
        Self {
            means,
            goal,
            microbatches,
            grads,
            reduction,
            activations: BTreeMap::new(),
            gradients: BTreeMap::new(),
            open: BTreeMap::new(),
            report: ForwardBackwardReport::default(),
            outcome: Ok(()),
        }
    }

    /// Runs the schedule and waits for the gradients' reduction. The inner result is the objective's.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn run(
        mut self,
        schedule: &PipelineSchedule,
    ) -> Result<Result<ForwardBackwardReport>> {
        for &action in &schedule.actions {
            match action {
                PipelineAction::Forward { microbatch, chunk } => {
                    self.forward((microbatch, chunk))?
                }
                PipelineAction::Backward { microbatch, chunk } => {
                    self.backward((microbatch, chunk))?;
                }
            }
        }
        self.reduction.finish()?;
        Ok(self.outcome.map(|()| self.report))
    }

    fn forward(&mut self, at: At) -> Result<()> {
        let (microbatch, chunk) = (&self.microbatches[at.0], &self.means.model.chunks[at.1]);
        if !microbatch.active {
            if chunk.head.is_some() {
                let value = self.goal.of_nothing(&microbatch.batch);
                self.record(value);
            }
            return Ok(());
        }
        let (cx, params) = (self.means.context(microbatch), self.means.params);
        let (x, saved) = chunk.forward(&cx, params, self.activations.remove(&at))?;
        let head = match &chunk.head {
            None => {
                self.activations.insert(at, x);
                None
            }
            Some(head) => {
                let batch = &microbatch.batch;
                let (state, value) =
                    self.goal
                        .forward((head, &cx), params, self.grads, batch, &x)?;
                self.record(value);
                Some(state)
            }
        };
        self.open.insert(at, Open { saved, head });
        Ok(())
    }

    fn backward(&mut self, at: At) -> Result<()> {
        let (microbatch, chunk) = (&self.microbatches[at.0], &self.means.model.chunks[at.1]);
        let last = at.0 + 1 == self.microbatches.len();
        let reduction = &mut self.reduction;
        let mut done = |bucket, grads: &mut Buffers| match last {
            true => reduction.start(bucket, grads),
            false => Ok(()),
        };
        if !microbatch.active {
            return chunk.buckets().try_for_each(|b| done(b, self.grads));
        }
        let (cx, params) = (self.means.context(microbatch), self.means.params);
        let open = self.open.remove(&at).ok_or_else(|| missing("a forward"))?;
        let dx = match (&chunk.head, open.head) {
            (Some(head), Some(state)) => {
                let dx = state.backward((head, &cx), params, self.grads)?;
                done(head.bucket(), self.grads)?;
                dx
            }
            _ => {
                let came = self.gradients.remove(&at);
                came.ok_or_else(|| missing("a gradient"))?
            }
        };
        let before = chunk.backward(&cx, params, self.grads, open.saved, dx, done)?;
        if let Some(dx) = before {
            self.gradients.insert(at, dx);
        }
        Ok(())
    }

    fn record(&mut self, value: Result<drivetrain_core::objective::ObjectiveValue>) {
        match value {
            Ok(value) => {
                self.report.loss += value.loss;
                self.report.metrics.merge(&value.metrics);
            }
            Err(error) if self.outcome.is_ok() => self.outcome = Err(error),
            Err(_) => {}
        }
    }
}

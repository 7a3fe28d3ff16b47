//! One `forward_backward`: every micro-batch through this rank's chunks and back, in the order of the schedule.

use std::collections::BTreeMap;

use drivetrain_core::{
    Result,
    engine::ForwardBackwardReport,
    moe::{LOAD_BALANCING_LOSS, ROUTER_Z_LOSS},
    objective::ObjectiveValue,
    plan::{PipelineAction, PipelineSchedule},
};
use drivetrain_kernels::On;

use crate::{
    data_parallel::Reduction,
    microbatch::{Goal, HeadState, Microbatch},
    model::{Model, missing},
    modules::{Context, RopeTables, RouterTally, SavedBlock},
    pipeline_parallel::{At, Transfers},
    ranks::Ranks,
    weights::{Policy, Sums},
    workspace::Workspace,
};

/// What a pass computes with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Means<'a> {
    pub(crate) model: &'a Model,
    pub(crate) policy: &'a Policy,
    pub(crate) cpu: On<'a>,
    pub(crate) workspace: &'a Workspace,
    pub(crate) rope: &'a RopeTables,
    pub(crate) ranks: &'a Ranks,
}

/// A pass under way.
#[derive(Debug)]
pub(crate) struct Pass<'a> {
    means: Means<'a>,
    goal: Goal<'a>,
    microbatches: &'a [Microbatch],
    grads: &'a mut Sums,
    reduction: Reduction<'a>,
    /// What came for a chunk's forward, and what its forward made for the next.
    activations: Transfers,
    /// What came for its backward, and what its backward made for the one before.
    gradients: Transfers,
    open: BTreeMap<At, Open>,
    report: ForwardBackwardReport,
    tally: RouterTally,
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
            bias: &self.policy.bias,
            router: None,
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
        grads: &'a mut Sums,
        reduction: Reduction<'a>,
    ) -> Self {
        Self {
            means,
            goal,
            microbatches,
            grads,
            reduction,
            activations: Transfers::default(),
            gradients: Transfers::default(),
            open: BTreeMap::new(),
            report: ForwardBackwardReport::default(),
            tally: goal.router.tally(),
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
        self.means.workspace.begin_pass();
        for &action in &schedule.actions {
            self.act(action)?;
        }
        self.activations.finish()?;
        self.gradients.finish()?;
        self.reduction.finish()?;
        let (tally, losses) = (self.tally, self.goal.router.losses);
        let metrics = &mut self.report.metrics;
        if losses.balancing.is_some() {
            metrics.sum(LOAD_BALANCING_LOSS, tally.balancing);
        }
        if losses.z_coefficient != 0.0 {
            metrics.sum(ROUTER_Z_LOSS, tally.z);
        }
        self.report.expert_tokens = tally.expert_tokens;
        Ok(self.outcome.map(|()| self.report))
    }

    fn context(&self, microbatch: &'a Microbatch) -> Context<'a> {
        Context {
            router: Some(self.goal.router),
            ..self.means.context(microbatch)
        }
    }

    fn act(&mut self, action: PipelineAction) -> Result<()> {
        use PipelineAction as Action;
        let (means, parts) = (self.means, self.microbatches);
        match action {
            Action::Forward { microbatch, chunk } => self.forward((microbatch, chunk)),
            Action::Backward { microbatch, chunk } => self.backward((microbatch, chunk)),
            Action::ReceiveActivation {
                microbatch,
                chunk,
                peer,
            } => self
                .activations
                .receive(means, parts, (microbatch, chunk), peer),
            Action::SendActivation {
                microbatch,
                chunk,
                peer,
            } => self.activations.send(means, (microbatch, chunk), peer),
            Action::ReceiveGradient {
                microbatch,
                chunk,
                peer,
            } => self
                .gradients
                .receive(means, parts, (microbatch, chunk), peer),
            Action::SendGradient {
                microbatch,
                chunk,
                peer,
            } => self.gradients.send(means, (microbatch, chunk), peer),
        }
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
        let (cx, params) = (self.context(microbatch), &self.means.policy.params);
        let loaned = self.means.workspace.loaned();
        let input = self.activations.take(self.means, at)?;
        let (x, saved) = chunk.forward(&cx, params, input, &mut self.tally)?;
        self.means.workspace.note_saved(loaned, &x);
        let head = match &chunk.head {
            None => {
                self.activations.leave(at, x);
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
        let (cx, params) = (self.context(microbatch), &self.means.policy.params);
        let reduction = &mut self.reduction;
        let mut done = |bucket, grads: &mut Sums| match last {
            true => reduction.start(bucket, grads),
            false => Ok(()),
        };
        if !microbatch.active {
            return chunk.buckets().try_for_each(|b| done(b, self.grads));
        }
        let open = self.open.remove(&at).ok_or_else(|| missing("a forward"))?;
        let dx = match (&chunk.head, open.head) {
            (Some(head), Some(state)) => {
                let dx = state.backward((head, &cx), params, self.grads)?;
                done(head.bucket(), self.grads)?;
                dx
            }
            _ => {
                let came = self.gradients.take(self.means, at)?;
                came.ok_or_else(|| missing("a gradient"))?
            }
        };
        let before = chunk.backward(&cx, params, self.grads, open.saved, dx, done)?;
        if let Some(dx) = before {
            self.gradients.leave(at, dx);
        }
        Ok(())
    }

    fn record(&mut self, value: Result<ObjectiveValue>) {
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

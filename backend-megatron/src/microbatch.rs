//! One micro-batch at the head: from hidden states to the objective, and back.

use drivetrain_core::{
    Result,
    batch::{Batch, BatchTotals},
    objective::{Objective, ObjectiveValue, TokenOutputs},
};

use crate::{
    modules::{Context, Head, HeadGradients, HeadOutputs, HeadRequest, RouterGoal, SavedHead},
    packed::Packed,
    weights::{Buffers, Sums},
    workspace::Buffer,
};

/// A micro-batch of a step.
#[derive(Debug)]
pub(crate) struct Microbatch {
    pub(crate) batch: Batch,
    pub(crate) packed: Packed,
    /// Whether it has a gradient; what has none passes through no layer.
    pub(crate) active: bool,
    /// Whether its backward adds to the gradients, or is the first of its step and overwrites them.
    pub(crate) accumulate: bool,
}

/// Between the head's forward and its backward.
#[derive(Debug)]
pub(crate) enum HeadState {
    /// It has to go backward.
    Forwarded(Box<SavedHead>, HeadGradients),
    /// It has been backward already; the gradient of its input [S, D].
    Done(Buffer),
}

/// What a step's objective sees.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Goal<'a> {
    pub(crate) objective: &'a dyn Objective,
    pub(crate) totals: &'a BatchTotals,
    pub(crate) router: RouterGoal<'a>,
}

impl Goal<'_> {
    /// What the head has to compute.
    pub(crate) fn request(&self) -> HeadRequest {
        let requirements = self.objective.requires();
        HeadRequest {
            temperature: requirements.temperature,
            entropy: requirements.entropy,
        }
    }

    /// The value of a micro-batch of which nothing is scored.
    ///
    /// # Errors
    /// The objective's.
    pub(crate) fn of_nothing(&self, batch: &Batch) -> Result<ObjectiveValue> {
        let blank = self.request().blank(batch.num_tokens());
        self.objective.evaluate(batch, &blank, self.totals)
    }

    /// Head and objective. Where the objective's derivative is known, the head's backward too. A rank whose
    /// objective fails goes on with derivatives of 0, so that the others do not wait for it.
    ///
    /// # Errors
    /// The communicator's. The objective's are in the value.
    pub(crate) fn forward(
        &self,
        (head, cx): (&Head, &Context<'_>),
        params: &Buffers,
        grads: &mut Sums,
        batch: &Batch,
        x: &[f32], // [S, D]
    ) -> Result<(HeadState, Result<ObjectiveValue>)> {
        let request = self.request();
        let evaluate =
            |outputs: &TokenOutputs| self.objective.evaluate(batch, outputs, self.totals);
        let gradients = |value: &Result<ObjectiveValue>| match value {
            Ok(value) => HeadGradients {
                log_probs: cx.packed.gather(&value.d_log_probs),
                entropy: value.d_entropy.as_ref().map(|d| cx.packed.gather(d)),
            },
            Err(_) => HeadGradients {
                log_probs: vec![0.0; cx.packed.num_scored()],
                entropy: None,
            },
        };
        if self.objective.derivative_known() {
            let known = evaluate(&request.blank(batch.num_tokens()));
            let gradients = gradients(&known);
            let (outputs, dx) = head.forward_backward(cx, params, grads, x, request, &gradients)?;
            let outputs = outputs.whole(cx)?;
            let value = known.and_then(|_| evaluate(&outputs));
            return Ok((HeadState::Done(dx), value));
        }
        let (outputs, saved) = head.forward(cx, params, x, request, true)?;
        let value = evaluate(&outputs.whole(cx)?);
        let gradients = gradients(&value);
        Ok((HeadState::Forwarded(Box::new(saved), gradients), value))
    }
}

impl HeadState {
    /// The gradient of the head's input, [S, D].
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn backward(
        self,
        (head, cx): (&Head, &Context<'_>),
        params: &Buffers,
        grads: &mut Sums,
    ) -> Result<Buffer> {
        match self {
            Self::Done(dx) => Ok(dx),
            Self::Forwarded(saved, gradients) => {
                head.backward(cx, params, grads, *saved, &gradients)
            }
        }
    }
}

impl HeadRequest {
    /// Outputs of 0 for `tokens` tokens.
    pub(crate) fn blank(self, tokens: usize) -> TokenOutputs {
        TokenOutputs {
            log_probs: vec![0.0; tokens],
            entropy: self.entropy.then(|| vec![0.0; tokens]),
            ..TokenOutputs::default()
        }
    }
}

impl HeadOutputs {
    /// Those of all of the micro-batch's tokens, each in its place, 0 elsewhere.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn whole(self, cx: &Context<'_>) -> Result<TokenOutputs> {
        let mut outputs = TokenOutputs {
            log_probs: cx.packed.spread(self.log_probs),
            entropy: self.entropy.map(|e| cx.packed.spread(e)),
            ..TokenOutputs::default()
        };
        cx.ranks.context.join(&mut outputs)?;
        Ok(outputs)
    }
}

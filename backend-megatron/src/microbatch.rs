//! One micro-batch through the model: forward to the objective, and backward from it.

use drivetrain_core::{
    Result,
    batch::{Batch, BatchTotals},
    objective::{Objective, ObjectiveValue, TokenOutputs},
};

use crate::{
    model::Model,
    modules::{Context, HeadGradients, HeadOutputs, HeadRequest, SavedBlock, SavedHead},
    packed::Packed,
    weights::Buffers,
    workspace::Buffer,
};

/// A micro-batch between its forward and its backward. By default an empty one.
#[derive(Debug, Default)]
pub(crate) struct OpenMicrobatch {
    pub(crate) packed: Packed,
    pub(crate) accumulate: bool,
    pub(crate) state: State,
}

/// What a micro-batch keeps.
#[derive(Debug, Default)]
pub(crate) enum State {
    /// No token is scored: no gradient, and none is written.
    #[default]
    Unscored,
    /// The head has to go backward.
    Forwarded(Vec<SavedBlock>, Box<SavedHead>, HeadGradients),
    /// The head has been backward already; the gradient of its input [T, D].
    HeadDone(Vec<SavedBlock>, Buffer),
}

/// Runs the model and the objective. Where the objective's derivative is known, the head's backward too.
///
/// # Errors
/// The objective's.
pub(crate) fn forward(
    model: &Model,
    cx: &Context<'_>,
    params: &Buffers,
    grads: &mut Buffers,
    part: &Batch,
    objective: &dyn Objective,
    totals: &BatchTotals,
) -> Result<(State, ObjectiveValue)> {
    let requirements = objective.requires();
    let request = HeadRequest {
        temperature: requirements.temperature,
        entropy: requirements.entropy,
    };
    let evaluate = |outputs: &TokenOutputs| objective.evaluate(part, outputs, totals);
    let blank = TokenOutputs {
        log_probs: vec![0.0; part.num_tokens()],
        entropy: request.entropy.then(|| vec![0.0; part.num_tokens()]),
        ..TokenOutputs::default()
    };
    if cx.packed.num_scored() == 0 {
        return Ok((State::Unscored, evaluate(&blank)?));
    }
    let gradients = |value: &ObjectiveValue| HeadGradients {
        log_probs: cx.packed.gather(&value.d_log_probs),
        entropy: value.d_entropy.as_ref().map(|d| cx.packed.gather(d)),
    };
    let known = match objective.derivative_known() {
        true => Some(gradients(&evaluate(&blank)?)),
        false => None,
    };
    let (x, saved) = blocks(model, cx, params);
    if let Some(known) = known {
        let (outputs, dx) = model
            .head
            .forward_backward(cx, params, grads, &x, request, &known);
        let value = evaluate(&outputs.spread(cx.packed))?;
        return Ok((State::HeadDone(saved, dx), value));
    }
    let (outputs, head) = model.head.forward(cx, params, &x, request, true);
    let value = evaluate(&outputs.spread(cx.packed))?;
    let gradients = gradients(&value);
    Ok((State::Forwarded(saved, Box::new(head), gradients), value))
}

/// Adds the micro-batch's gradients. `done` is told of each bucket that is complete, last first.
///
/// # Errors
/// Those of `done`.
pub(crate) fn backward(
    model: &Model,
    cx: &Context<'_>,
    params: &Buffers,
    grads: &mut Buffers,
    state: State,
    mut done: impl FnMut(usize, &mut Buffers) -> Result<()>,
) -> Result<()> {
    let (saved, mut dx) = match state {
        State::Unscored => {
            return (0..model.layout.buckets().len())
                .rev()
                .try_for_each(|b| done(b, grads));
        }
        State::Forwarded(saved, head, gradients) => {
            let dx = model.head.backward(cx, params, grads, *head, &gradients);
            (saved, dx)
        }
        State::HeadDone(saved, dx) => (saved, dx),
    };
    done(model.head.bucket(), grads)?;
    for (block, saved) in model.blocks.iter().zip(saved).rev() {
        block.backward(cx, params, grads, saved, &mut dx);
        done(block.bucket(), grads)?;
    }
    model.embedding.backward(cx, grads, &dx);
    done(model.embedding.bucket(), grads)
}

/// Log-probs and entropies of the scored positions, keeping no activations.
pub(crate) fn score(
    model: &Model,
    cx: &Context<'_>,
    params: &Buffers,
    request: HeadRequest,
) -> HeadOutputs {
    if cx.packed.num_scored() == 0 {
        return HeadOutputs::new(0, request);
    }
    let mut x = model.embedding.forward(cx, params);
    for block in &model.blocks {
        x = block.forward(cx, params, x).0;
    }
    model.head.forward(cx, params, &x, request, false).0
}

impl HeadOutputs {
    /// In their tokens' places, 0 elsewhere.
    pub(crate) fn spread(self, packed: &Packed) -> TokenOutputs {
        TokenOutputs {
            log_probs: packed.spread(self.log_probs),
            entropy: self.entropy.map(|e| packed.spread(e)),
            ..TokenOutputs::default()
        }
    }
}

fn blocks(model: &Model, cx: &Context<'_>, params: &Buffers) -> (Buffer, Vec<SavedBlock>) {
    let mut x = model.embedding.forward(cx, params);
    let mut saved = Vec::with_capacity(model.blocks.len());
    for block in &model.blocks {
        let (y, kept) = block.forward(cx, params, x);
        saved.push(kept);
        x = y;
    }
    (x, saved)
}

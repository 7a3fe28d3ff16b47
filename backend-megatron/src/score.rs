//! Scoring: every micro-batch forward only, keeping no activations.

use drivetrain_core::{
    Result,
    objective::TokenOutputs,
    plan::{PipelineAction, PipelineSchedule},
};

use crate::{
    microbatch::Microbatch,
    modules::{HeadRequest, RouterTally},
    pass::Means,
    pipeline_parallel::{At, Transfers},
};

/// Log-probs and entropies of the predicted tokens, whole on every rank that sees the same data.
///
/// # Errors
/// The communicator's.
pub(crate) fn score(
    means: Means<'_>,
    microbatches: &[Microbatch],
    schedule: &PipelineSchedule,
    request: HeadRequest,
) -> Result<TokenOutputs> {
    let mut outputs: Vec<_> = microbatches
        .iter()
        .map(|m| request.blank(m.batch.num_tokens()))
        .collect();
    let mut transfers = Transfers::default();
    for &action in &schedule.actions {
        match action {
            PipelineAction::ReceiveActivation {
                microbatch,
                chunk,
                peer,
            } => transfers.receive(means, microbatches, (microbatch, chunk), peer)?,
            PipelineAction::SendActivation {
                microbatch,
                chunk,
                peer,
            } => transfers.send(means, (microbatch, chunk), peer)?,
            PipelineAction::Forward { microbatch, chunk } => {
                let (part, at) = (&microbatches[microbatch], (microbatch, chunk));
                if let Some(found) = forward(means, part, at, &mut transfers, request)? {
                    outputs[microbatch] = found;
                }
            }
            PipelineAction::Backward { .. }
            | PipelineAction::ReceiveGradient { .. }
            | PipelineAction::SendGradient { .. } => {}
        }
    }
    transfers.finish()?;
    let mut joined = TokenOutputs::default();
    for part in outputs {
        joined.append(part);
    }
    means.ranks.pipeline.tell(&mut joined)?;
    Ok(joined)
}

fn forward(
    means: Means<'_>,
    microbatch: &Microbatch,
    at: At,
    transfers: &mut Transfers,
    request: HeadRequest,
) -> Result<Option<TokenOutputs>> {
    if !microbatch.active {
        return Ok(None);
    }
    let (chunk, cx) = (&means.model.chunks[at.1], means.context(microbatch));
    let input = transfers.take(means, at)?;
    let params = &means.policy.params;
    let (x, _) = chunk.forward(&cx, params, input, &mut RouterTally::default())?;
    match &chunk.head {
        Some(head) => {
            let (found, _) = head.forward(&cx, params, &x, request, false)?;
            found.whole(&cx).map(Some)
        }
        None => {
            transfers.leave(at, x);
            Ok(None)
        }
    }
}

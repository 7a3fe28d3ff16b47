//! Scoring: every micro-batch forward only, keeping no activations.

use std::ops::Range;

use drivetrain_core::{Result, objective::TokenOutputs};

use crate::{microbatch::Microbatch, modules::HeadRequest, pass::Means, workspace::Buffer};

/// Log-probs and entropies of the predicted tokens, whole on every rank that sees the same data.
///
/// # Errors
/// The communicator's.
pub(crate) fn score(
    means: Means<'_>,
    microbatches: &[Microbatch],
    request: HeadRequest,
) -> Result<TokenOutputs> {
    let pipeline = &means.ranks.pipeline;
    let stages = pipeline.shape.stages;
    let mut outputs = vec![TokenOutputs::default(); microbatches.len()];
    // As many at once as there are stages keep all of them busy, chunk after chunk.
    for start in (0..microbatches.len()).step_by(stages) {
        let some = start..microbatches.len().min(start + stages);
        for index in 0..means.model.chunks.len() {
            pass_chunk(
                means,
                index,
                microbatches,
                some.clone(),
                request,
                &mut outputs,
            )?;
        }
    }
    let mut joined = TokenOutputs::default();
    for part in outputs {
        joined.append(part);
    }
    pipeline.tell(&mut joined)?;
    Ok(joined)
}

fn pass_chunk(
    means: Means<'_>,
    index: usize,
    microbatches: &[Microbatch],
    some: Range<usize>,
    request: HeadRequest,
    outputs: &mut [TokenOutputs],
) -> Result<()> {
    let (chunk, pipeline) = (&means.model.chunks[index], &means.ranks.pipeline);
    let (stage, stages) = (pipeline.shape.stage, pipeline.shape.stages);
    for at in some {
        let microbatch = &microbatches[at];
        if !microbatch.active || chunk.head.is_none() {
            outputs[at] = request.blank(microbatch.batch.num_tokens());
        }
        if !microbatch.active {
            continue;
        }
        let cx = means.context(microbatch);
        let input: Option<Buffer> = match chunk.embedding {
            Some(_) => None,
            None => {
                let before = (stage + stages - 1) % stages;
                let len = cx.num_rows() * means.model.width;
                Some(pipeline.receive(before, means.workspace, len)?)
            }
        };
        let (x, _) = chunk.forward(&cx, means.params, input)?;
        match &chunk.head {
            Some(head) => {
                let (found, _) = head.forward(&cx, means.params, &x, request, false)?;
                outputs[at] = found.whole(&cx)?;
            }
            None => pipeline.send((stage + 1) % stages, &x)?,
        }
    }
    Ok(())
}

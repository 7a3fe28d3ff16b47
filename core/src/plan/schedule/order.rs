//! In which order a stage computes.

use super::PipelineKind;

/// Forward or backward of a micro-batch through a chunk of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Compute {
    pub(super) forward: bool,
    pub(super) microbatch: usize,
    pub(super) chunk: usize,
}

/// Forwards before the first backward, less the one that each backward in the steady state follows.
pub(super) fn warmup(kind: PipelineKind, stage: usize, num_stages: usize) -> usize {
    let behind = num_stages - 1 - stage;
    match kind {
        PipelineKind::OneForwardOneBackward => behind,
        // A round of micro-batches for each chunk but the last; two for each stage behind, as a chunk's forward
        // there is answered one round trip later.
        PipelineKind::Interleaved { chunks } => 2 * behind + (chunks - 1) * num_stages,
    }
}

/// Every forward, in the order in which the stage does them: rounds of `num_stages` micro-batches, each through
/// all chunks in turn.
pub(super) fn forwards(
    kind: PipelineKind,
    num_stages: usize,
    num_microbatches: usize,
) -> Vec<Compute> {
    rounds(kind, num_stages, num_microbatches, true)
}

/// Warm-up, then a forward and a backward in turn, then the backwards that are left.
pub(super) fn step(
    kind: PipelineKind,
    stage: usize,
    num_stages: usize,
    num_microbatches: usize,
) -> Vec<Compute> {
    let forwards = rounds(kind, num_stages, num_microbatches, true);
    let mut backwards = rounds(kind, num_stages, num_microbatches, false).into_iter();
    let warmup = warmup(kind, stage, num_stages);
    let mut order = Vec::with_capacity(2 * forwards.len());
    for (done, forward) in forwards.into_iter().enumerate() {
        order.push(forward);
        if done >= warmup {
            order.extend(backwards.next());
        }
    }
    order.extend(backwards);
    order
}

fn rounds(
    kind: PipelineKind,
    num_stages: usize,
    num_microbatches: usize,
    forward: bool,
) -> Vec<Compute> {
    let chunks = kind.chunks();
    let round = match kind {
        PipelineKind::OneForwardOneBackward => 1,
        PipelineKind::Interleaved { .. } => num_stages,
    };
    (0..num_microbatches * chunks)
        .map(|n| {
            let turn = n / round % chunks;
            Compute {
                forward,
                microbatch: n / (round * chunks) * round + n % round,
                chunk: if forward { turn } else { chunks - 1 - turn },
            }
        })
        .collect()
}

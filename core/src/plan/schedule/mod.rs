//! Pipeline schedules as data: a list of actions for each stage.
//!
//! A stage holds one or more chunks of layers. Chunk `c` of stage `s` is part `c x stages + s` of the model, so
//! that a micro-batch passes all stages once for each chunk.

mod order;
mod transfers;

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

use crate::{Error, ErrorKind, Result, config::ParallelConfig};

/// Which schedule a pipeline runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PipelineKind {
    /// One forward, one backward, one chunk a stage (Narayanan et al. 2021, section 2.2.1).
    OneForwardOneBackward,
    /// The same over several chunks a stage: an idle time smaller by their number, for as many times the
    /// transfers (section 2.2.2). The number of micro-batches is a multiple of the stages.
    Interleaved {
        /// Chunks a stage, 2 or more.
        chunks: usize,
    },
}

impl PipelineKind {
    /// What a job's `parallel` section asks for.
    pub fn from_config(parallel: &ParallelConfig) -> Self {
        match parallel.virtual_pipeline_size {
            0 | 1 => Self::OneForwardOneBackward,
            chunks => Self::Interleaved { chunks },
        }
    }

    /// Chunks a stage.
    pub fn chunks(self) -> usize {
        match self {
            Self::OneForwardOneBackward => 1,
            Self::Interleaved { chunks } => chunks,
        }
    }

    /// What the number of micro-batches must be a multiple of.
    pub fn multiple_of(self, num_stages: usize) -> usize {
        match self {
            Self::OneForwardOneBackward => 1,
            Self::Interleaved { .. } => num_stages.max(1),
        }
    }

    /// The most forwards through a chunk of `stage` whose backward is still to come.
    pub fn most_in_flight(self, stage: usize, num_stages: usize, num_microbatches: usize) -> usize {
        (order::warmup(self, stage, num_stages) + 1).min(num_microbatches * self.chunks())
    }
}

/// One action of a stage. `chunk` is always the stage's own; `peer` is the other stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PipelineAction {
    /// Takes in the chunk's input.
    ReceiveActivation {
        /// Which micro-batch.
        microbatch: usize,
        /// The chunk that it goes into.
        chunk: usize,
        /// The stage that it comes from.
        peer: usize,
    },
    /// Forward of a micro-batch through a chunk.
    Forward {
        /// Which micro-batch.
        microbatch: usize,
        /// Which of the stage's chunks.
        chunk: usize,
    },
    /// Hands on the chunk's output.
    SendActivation {
        /// Which micro-batch.
        microbatch: usize,
        /// The chunk that it comes out of.
        chunk: usize,
        /// The stage that it goes to.
        peer: usize,
    },
    /// Takes in the gradient of the chunk's output.
    ReceiveGradient {
        /// Which micro-batch.
        microbatch: usize,
        /// The chunk whose output it belongs to.
        chunk: usize,
        /// The stage that it comes from.
        peer: usize,
    },
    /// Backward of a micro-batch through a chunk.
    Backward {
        /// Which micro-batch.
        microbatch: usize,
        /// Which of the stage's chunks.
        chunk: usize,
    },
    /// Hands on the gradient of the chunk's input.
    SendGradient {
        /// Which micro-batch.
        microbatch: usize,
        /// The chunk whose input it belongs to.
        chunk: usize,
        /// The stage that it goes to.
        peer: usize,
    },
}

/// What one stage does in a step, in order. Made for each batch: it depends on the number of micro-batches.
///
/// A transfer stands where it starts: a send right behind what makes its content, a receive where its sender
/// sends. An engine may wait for a receive as late as at the action that needs it. It may as well wait at once:
/// all stages' lists are parts of one order of all actions and transfers, so they do not deadlock even where a
/// send blocks until it is received (NCCL's, on one communicator). Between two stages transfers are sent and received
/// in the same order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PipelineSchedule {
    /// The actions.
    pub actions: Vec<PipelineAction>,
}

impl PipelineSchedule {
    /// The step of `stage` over this many micro-batches. With one stage, chunks hand on to each other without a
    /// transfer.
    ///
    /// # Errors
    /// `Data` if the number of micro-batches is not a multiple of what the schedule needs;
    /// [`TrainPlan::cut`](super::TrainPlan::cut) makes one that is.
    pub fn of(
        kind: PipelineKind,
        stage: usize,
        num_stages: usize,
        num_microbatches: usize,
    ) -> Result<Self> {
        whole(kind, num_stages, num_microbatches)?;
        let orders = |s| order::step(kind, s, num_stages, num_microbatches);
        Ok(transfers::place(stage, num_stages, kind.chunks(), orders))
    }

    /// Forward alone, for scoring.
    ///
    /// # Errors
    /// As [`Self::of`].
    pub fn forward_only(
        kind: PipelineKind,
        stage: usize,
        num_stages: usize,
        num_microbatches: usize,
    ) -> Result<Self> {
        whole(kind, num_stages, num_microbatches)?;
        let orders = |_| order::forwards(kind, num_stages, num_microbatches);
        Ok(transfers::place(stage, num_stages, kind.chunks(), orders))
    }
}

fn whole(kind: PipelineKind, num_stages: usize, num_microbatches: usize) -> Result<()> {
    let multiple = kind.multiple_of(num_stages);
    if num_microbatches.is_multiple_of(multiple) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Data,
        "make_schedule",
        "interleaved stages need micro-batches in whole rounds",
    )
    .with("found", format!("{num_microbatches} micro-batches"))
    .with("expected", format!("a multiple of the {multiple} stages"))
    .help("cut the batch with TrainPlan::cut, which fills up with empty micro-batches"))
}

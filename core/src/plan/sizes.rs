//! The sizes that a plan's operations are counted for.

use super::PipelineKind;
use crate::{Result, config::JobSpec};

/// What a rank works on, as far as a job says it before its data is seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// Sequences of the largest share of a step.
    pub share: usize,
    /// Micro-batches of a share, if every sequence is a group of its own; by tokens it depends on the data: 1.
    pub num_microbatches: usize,
    /// Longest sequence, in tokens.
    pub longest: usize,
    /// Tokens of a micro-batch: the token budget, or full-length sequences.
    pub tokens: usize,
}

impl Sizes {
    /// Those of a job.
    ///
    /// # Errors
    /// As [`JobSpec::mesh`].
    pub fn of(job: &JobSpec) -> Result<Self> {
        let (mesh, batch) = (job.mesh()?, &job.config.batch);
        let share = batch
            .global_batch_size
            .div_ceil(mesh.data_size().max(1))
            .max(1);
        let micro = batch.micro_batch_size.unwrap_or(share).clamp(1, share);
        let most = job.model.max_position_embeddings;
        let longest = job.config.data.max_length.unwrap_or(most).min(most);
        Ok(Self {
            share,
            num_microbatches: share.div_ceil(micro).next_multiple_of(
                PipelineKind::from_config(&job.config.parallel).multiple_of(mesh.pipeline),
            ),
            longest,
            tokens: batch.micro_batch_tokens.unwrap_or(micro * longest),
        })
    }
}

//! Activations and gradients on their way between stages.

use std::collections::BTreeMap;

use drivetrain_core::{Result, communicator::Work};

use super::Arriving;
use crate::{microbatch::Microbatch, pass::Means, workspace::Buffer};

/// A micro-batch and a chunk of this rank.
pub(crate) type At = (usize, usize);

/// What passes between stages, by the micro-batch and this rank's chunk.
#[derive(Debug, Default)]
pub(crate) struct Transfers {
    arriving: BTreeMap<At, Arriving>,
    leaving: BTreeMap<At, Buffer>,
    sent: Vec<Work<'static>>,
}

impl Transfers {
    /// Starts to take in what a chunk needs.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn receive(
        &mut self,
        means: Means<'_>,
        microbatches: &[Microbatch],
        at: At,
        peer: usize,
    ) -> Result<()> {
        let microbatch = &microbatches[at.0];
        if microbatch.active {
            let len = means.context(microbatch).num_rows() * means.model.width;
            let arriving = means.ranks.pipeline.receive(peer, len)?;
            self.arriving.insert(at, arriving);
        }
        Ok(())
    }

    /// Starts to hand on what a chunk made.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn send(&mut self, means: Means<'_>, at: At, peer: usize) -> Result<()> {
        if let Some(leaving) = self.leaving.remove(&at) {
            self.sent.push(means.ranks.pipeline.send(peer, leaving)?);
        }
        Ok(())
    }

    /// Keeps what is to be sent.
    pub(crate) fn leave(&mut self, at: At, values: Buffer) {
        self.leaving.insert(at, values);
    }

    /// Waits for what was sent.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn finish(self) -> Result<()> {
        self.sent.into_iter().try_for_each(Work::wait)
    }

    /// What came, if anything was to come.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn take(&mut self, means: Means<'_>, at: At) -> Result<Option<Buffer>> {
        let arriving = self.arriving.remove(&at);
        arriving.map(|a| a.wait(means.workspace)).transpose()
    }
}

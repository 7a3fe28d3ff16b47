//! Checkpoints, free of layout and engine: pieces of global tensors, a manifest, checksums.

mod contents;
mod identity;
mod manifest;
mod reader;
mod runs;
mod save;
mod state;
mod store;
mod task;
#[cfg(test)]
mod tests;
mod writer;

pub use contents::{SavedFile, SavedPiece};
pub use identity::Identity;
pub use reader::Checkpoint;
pub use state::{check_state, read_into, read_step, write_step};
pub use store::{CheckpointStore, Scan};

use std::{fmt, ops::Range};

use serde::{Deserialize, Serialize};

use crate::{Result, View};

/// What a saved tensor is to its parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StateSlot {
    /// The master weight.
    Weight,
    /// AdamW's first moment.
    ExpAvg,
    /// AdamW's second moment.
    ExpAvgSq,
}

impl StateSlot {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Weight, Self::ExpAvg, Self::ExpAvgSq];
}

/// A run of elements of a global tensor, flattened in row-major order.
///
/// Every sharding of ours is a set of such runs: rows are one run; a split of the last dim is a run a row.
#[derive(Debug, Clone)]
pub struct StatePiece<'a> {
    /// The parameter's name.
    pub name: &'a str,
    /// What it is to the parameter.
    pub slot: StateSlot,
    /// Shape of the whole tensor.
    pub shape: &'a [usize],
    /// Where `data` lies in the flattened tensor; not empty, in order, not overlapping.
    pub runs: Vec<Range<usize>>,
    /// The values, run after run.
    pub data: View<'a>,
}

/// Takes one rank's pieces of a checkpoint. Each element of each tensor is written by exactly one rank.
pub trait StateWriter: Send + fmt::Debug {
    /// Takes a piece (copies or writes it before returning).
    ///
    /// # Errors
    /// `File` naming the path.
    fn piece(&mut self, piece: StatePiece<'_>) -> Result<()>;

    /// Takes a small named blob; the same on every rank, written by rank 0 (step, engine facts).
    ///
    /// # Errors
    /// `File` naming the path.
    fn blob(&mut self, name: &str, value: serde_json::Value) -> Result<()>;

    /// This rank has given all of its pieces. What is left to do is the handle's, which every rank
    /// [finishes](SaveHandle::finish): a write that fails fails there, on every rank.
    ///
    /// # Errors
    /// The writer's own.
    fn finish(self: Box<Self>) -> Result<SaveHandle>;
}

/// A complete checkpoint, read by global coordinates.
pub trait StateReader: Send + Sync + fmt::Debug {
    /// Shape of a saved tensor; `None` if it was not saved.
    fn shape(&self, name: &str, slot: StateSlot) -> Option<Vec<usize>>;

    /// Elements of these runs of the flattened tensor, as f32, run after run.
    ///
    /// # Errors
    /// `Checkpoint` if a piece is missing, `File` if a file or checksum is wrong.
    fn read(&self, name: &str, slot: StateSlot, runs: &[Range<usize>]) -> Result<Vec<f32>>;

    /// The same, as f64.
    ///
    /// # Errors
    /// As `read`.
    fn read_f64(&self, name: &str, slot: StateSlot, runs: &[Range<usize>]) -> Result<Vec<f64>> {
        Ok(self
            .read(name, slot, runs)?
            .into_iter()
            .map(f64::from)
            .collect())
    }

    /// A named blob.
    fn blob(&self, name: &str) -> Option<&serde_json::Value>;
}

/// What is left of a save, stage by stage.
pub trait PendingSave: Send + fmt::Debug {
    /// Whether this rank's work of the stage is done, so that [`Self::advance`] waits for other ranks alone.
    fn is_ready(&self) -> bool;

    /// Ends the stage and starts the next. Collective.
    ///
    /// # Errors
    /// The save's failure, on every rank; then no checkpoint has appeared.
    fn advance(self: Box<Self>) -> Result<SaveHandle>;
}

/// A save that may still be running. Dropped, it is given up.
#[derive(Debug)]
#[must_use = "a save is complete after finish()"]
pub struct SaveHandle(Option<Box<dyn PendingSave>>);

impl SaveHandle {
    /// A save that is complete.
    pub fn done() -> Self {
        Self(None)
    }

    /// A save of which this is left.
    pub fn pending(rest: impl PendingSave + 'static) -> Self {
        Self(Some(Box::new(rest)))
    }

    /// Whether the checkpoint is on disk and visible.
    pub fn is_done(&self) -> bool {
        self.0.is_none()
    }

    /// Whether this rank's work of the stage under way is done. Ranks get there at different times: they
    /// [`Self::advance`] together once all have.
    pub fn is_ready(&self) -> bool {
        self.0.as_ref().is_none_or(|rest| rest.is_ready())
    }

    /// Ends the stage under way and starts the next. Collective, on the thread of the rank's other collective
    /// operations.
    ///
    /// # Errors
    /// The save's failure, on every rank; then no checkpoint has appeared.
    pub fn advance(self) -> Result<Self> {
        self.0
            .map_or_else(|| Ok(Self::done()), PendingSave::advance)
    }

    /// Waits until the checkpoint is on disk and visible. Collective.
    ///
    /// # Errors
    /// As [`Self::advance`].
    pub fn finish(mut self) -> Result<()> {
        while !self.is_done() {
            self = self.advance()?;
        }
        Ok(())
    }
}

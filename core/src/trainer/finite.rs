//! Only what training can go on from is saved.

use serde_json::Value;

use crate::{
    Result,
    checkpoint::{SaveHandle, StatePiece, StateSlot, StateWriter},
    weights::not_finite,
};

/// The same writer, for which a weight that is not finite is an error: a checkpoint of a run that has diverged would
/// take the place of the last good one.
pub(super) fn only(inner: Box<dyn StateWriter>, step: u64) -> Box<dyn StateWriter> {
    Box::new(FiniteWeights { inner, step })
}

#[derive(Debug)]
struct FiniteWeights {
    inner: Box<dyn StateWriter>,
    step: u64,
}

impl StateWriter for FiniteWeights {
    fn piece(&mut self, piece: StatePiece<'_>) -> Result<()> {
        if piece.slot == StateSlot::Weight && !piece.data.all_finite() {
            return Err(not_finite("save_checkpoint", piece.name).with("step", self.step));
        }
        self.inner.piece(piece)
    }

    fn blob(&mut self, name: &str, value: Value) -> Result<()> {
        self.inner.blob(name, value)
    }

    fn finish(self: Box<Self>) -> Result<SaveHandle> {
        self.inner.finish()
    }
}

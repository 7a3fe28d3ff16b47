//! A checkpoint in memory, for moving state between engines, ranks and layouts without a file. It refuses what
//! a checkpoint must not be: an element written twice or never, a slot left out.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

use drivetrain_core::{
    Error, ErrorKind, Result,
    checkpoint::{SaveHandle, StatePiece, StateReader, StateSlot, StateWriter},
};

/// Collects the pieces of all ranks.
#[derive(Debug, Clone, Default)]
pub struct MemoryState(Arc<Mutex<Pieces>>);

#[derive(Debug, Default)]
struct Pieces {
    tensors: BTreeMap<(String, StateSlot), Tensor>,
    blobs: BTreeMap<String, serde_json::Value>,
    finished: usize,
}

#[derive(Debug)]
struct Tensor {
    shape: Vec<usize>,
    values: Vec<f64>,
    written: Vec<bool>,
}

/// A checkpoint that all ranks have finished.
#[derive(Debug)]
pub struct MemoryCheckpoint {
    tensors: BTreeMap<(String, StateSlot), Tensor>,
    blobs: BTreeMap<String, serde_json::Value>,
}

impl MemoryState {
    /// A checkpoint that nobody has written to.
    pub fn new() -> Self {
        Self::default()
    }

    /// One rank's writer.
    pub fn writer(&self) -> Box<dyn StateWriter> {
        Box::new(self.clone())
    }

    /// The checkpoint, once `ranks` ranks have finished.
    ///
    /// # Errors
    /// `Checkpoint` if a rank did not finish, or an element was never written.
    pub fn complete(&self, ranks: usize) -> Result<MemoryCheckpoint> {
        let mut pieces = self.lock();
        if pieces.finished != ranks {
            return Err(fault("not every rank finished its part of the checkpoint")
                .with("expected", ranks)
                .with("found", pieces.finished));
        }
        for ((name, slot), tensor) in &pieces.tensors {
            if let Some(hole) = tensor.written.iter().position(|w| !w) {
                return Err(fault("an element was never written")
                    .with("tensor", name)
                    .with("slot", format!("{slot:?}"))
                    .with("element", hole));
            }
        }
        Ok(MemoryCheckpoint {
            tensors: std::mem::take(&mut pieces.tensors),
            blobs: std::mem::take(&mut pieces.blobs),
        })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Pieces> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StateWriter for MemoryState {
    fn piece(&mut self, piece: StatePiece<'_>) -> Result<()> {
        let at = |e: Error| {
            e.with("tensor", piece.name)
                .with("slot", format!("{:?}", piece.slot))
        };
        let data = piece.data.to_f64();
        let data = data.ok_or_else(|| at(fault("the piece is not in host memory")))?;
        let len: usize = piece.shape.iter().product();
        let elements: usize = piece.runs.iter().map(Range::len).sum();
        if elements != data.len() {
            return Err(
                at(fault("the runs do not hold as many elements as the data"))
                    .with("expected", elements)
                    .with("found", data.len()),
            );
        }
        let mut pieces = self.lock();
        let key = (piece.name.to_owned(), piece.slot);
        let tensor = pieces.tensors.entry(key).or_insert_with(|| Tensor {
            shape: piece.shape.to_vec(),
            values: vec![f64::NAN; len],
            written: vec![false; len],
        });
        if tensor.shape != piece.shape {
            return Err(at(fault("ranks disagree on the tensor's shape")));
        }
        let mut data = data.into_iter();
        for run in &piece.runs {
            if run.is_empty() || run.end > len {
                return Err(at(fault("a run is empty or ends outside the tensor"))
                    .with("found", format!("{run:?}"))
                    .with("expected", format!("within 0..{len}")));
            }
            for element in run.clone() {
                if std::mem::replace(&mut tensor.written[element], true) {
                    return Err(at(fault("an element was written twice")).with("element", element));
                }
                tensor.values[element] = data.next().unwrap_or(f64::NAN);
            }
        }
        Ok(())
    }

    fn blob(&mut self, name: &str, value: serde_json::Value) -> Result<()> {
        let mut pieces = self.lock();
        match pieces.blobs.insert(name.to_owned(), value.clone()) {
            Some(other) if other != value => {
                Err(fault("ranks wrote different values of a blob").with("blob", name))
            }
            _ => Ok(()),
        }
    }

    fn finish(self: Box<Self>) -> Result<SaveHandle> {
        self.lock().finished += 1;
        Ok(SaveHandle::done())
    }
}

impl StateReader for MemoryCheckpoint {
    fn shape(&self, name: &str, slot: StateSlot) -> Option<Vec<usize>> {
        let tensor = self.tensors.get(&(name.to_owned(), slot));
        tensor.map(|t| t.shape.clone())
    }

    fn read(&self, name: &str, slot: StateSlot, runs: &[Range<usize>]) -> Result<Vec<f32>> {
        let values = self.read_f64(name, slot, runs)?;
        Ok(values.into_iter().map(|v| v as f32).collect())
    }

    fn read_f64(&self, name: &str, slot: StateSlot, runs: &[Range<usize>]) -> Result<Vec<f64>> {
        let missing = || {
            fault("the checkpoint does not hold this")
                .with("tensor", name)
                .with("slot", format!("{slot:?}"))
        };
        let tensor = self.tensors.get(&(name.to_owned(), slot));
        let values = &tensor.ok_or_else(missing)?.values;
        let mut read = Vec::new();
        for run in runs {
            let run = values.get(run.clone()).ok_or_else(missing)?;
            read.extend_from_slice(run);
        }
        Ok(read)
    }

    fn blob(&self, name: &str) -> Option<&serde_json::Value> {
        self.blobs.get(name)
    }
}

impl MemoryCheckpoint {
    /// The same without the moments, as a weights-only checkpoint would be read: zeros in their place.
    #[must_use]
    pub fn without_moments(mut self) -> Self {
        for ((_, slot), tensor) in &mut self.tensors {
            if *slot != StateSlot::Weight {
                tensor.values.fill(0.0);
            }
        }
        self
    }

    /// Names and slots that it holds, with their values.
    pub fn iter(&self) -> impl Iterator<Item = (&str, StateSlot, &[f64])> {
        let tensors = self.tensors.iter();
        tensors.map(|((name, slot), t)| (name.as_str(), *slot, t.values.as_slice()))
    }
}

fn fault(message: &str) -> Error {
    Error::new(ErrorKind::Checkpoint, "memory_checkpoint", message)
}

#[cfg(test)]
mod tests {
    use drivetrain_core::View;

    use super::*;

    fn piece(run: Range<usize>, data: &[f32]) -> StatePiece<'_> {
        pieces([run], data)
    }

    fn pieces<const N: usize>(runs: [Range<usize>; N], data: &[f32]) -> StatePiece<'_> {
        StatePiece {
            name: "w",
            slot: StateSlot::Weight,
            shape: &[2, 2],
            runs: runs.into(),
            data: View::F32(data),
        }
    }

    #[test]
    fn pieces_of_two_ranks_make_a_whole() {
        let state = MemoryState::new();
        let (mut a, mut b) = (state.writer(), state.writer());
        a.piece(pieces([0..1, 2..3], &[1.0, 3.0])).unwrap();
        b.piece(pieces([1..2, 3..4], &[2.0, 4.0])).unwrap();
        a.finish().unwrap().finish().unwrap();
        assert!(state.complete(2).is_err());
        b.finish().unwrap().finish().unwrap();
        let whole = state.complete(2).unwrap();
        let slot = StateSlot::Weight;
        let read = whole.read("w", slot, std::slice::from_ref(&(0..4)));
        assert_eq!(read.unwrap(), [1.0, 2.0, 3.0, 4.0]);
        assert!(
            whole
                .read("w", slot, std::slice::from_ref(&(0..5)))
                .is_err()
        );
        assert!(whole.read("v", slot, &[]).is_err());
    }

    #[test]
    fn holes_and_overlaps_are_faults() {
        let state = MemoryState::new();
        let mut writer = state.writer();
        writer.piece(piece(0..3, &[1.0; 3])).unwrap();
        assert!(writer.piece(piece(2..4, &[1.0; 2])).is_err());
        assert!(writer.piece(piece(3..5, &[1.0; 2])).is_err());
        let state = MemoryState::new();
        let mut writer = state.writer();
        writer.piece(piece(0..3, &[1.0; 3])).unwrap();
        writer.finish().unwrap().finish().unwrap();
        assert!(state.complete(1).is_err());
    }
}

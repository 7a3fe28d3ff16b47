//! Where global batches come from.

use std::fmt;

use serde_json::{Value, json};

use crate::{Error, ErrorKind, Result, batch::Batch};

/// Gives global batches, the same on every rank in the same order.
pub trait BatchSource: Send + fmt::Debug {
    /// The next global batch.
    ///
    /// # Errors
    /// `Data` naming file and line.
    fn next_batch(&mut self) -> Result<Batch>;

    /// The position: what `restore` needs to give the batches that would have come next.
    fn state(&self) -> Value;

    /// Goes to a position.
    ///
    /// # Errors
    /// `Checkpoint` if it is another data set's.
    fn restore(&mut self, state: &Value) -> Result<()>;
}

/// The same few batches over and over: benchmarks and tests.
#[derive(Debug, Clone)]
pub struct CyclicSource {
    batches: Vec<Batch>,
    position: usize,
}

impl CyclicSource {
    /// Cycles through these batches.
    ///
    /// # Errors
    /// `Data` if there are none.
    pub fn new(batches: Vec<Batch>) -> Result<Self> {
        if batches.is_empty() {
            return Err(Error::new(
                ErrorKind::Data,
                "cycle_batches",
                "no batch to cycle through",
            ));
        }
        Ok(Self {
            batches,
            position: 0,
        })
    }
}

impl BatchSource for CyclicSource {
    fn next_batch(&mut self) -> Result<Batch> {
        let batch = self.batches[self.position % self.batches.len()].clone();
        self.position += 1;
        Ok(batch)
    }

    fn state(&self) -> Value {
        json!({ "position": self.position })
    }

    fn restore(&mut self, state: &Value) -> Result<()> {
        let position = state
            .get("position")
            .and_then(Value::as_u64)
            .ok_or_else(|| {
                Error::new(
                    ErrorKind::Checkpoint,
                    "restore_data",
                    "not a position of this source",
                )
                .with("found", state)
            })?;
        self.position = position as usize;
        Ok(())
    }
}

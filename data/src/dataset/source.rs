//! Batches without end, from a position that a checkpoint can hold.

use std::sync::Arc;

use drivetrain_core::{Error, ErrorKind, Result, batch::Batch, trainer::BatchSource};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Dataset, order};

/// Batches of a data set, epoch after epoch.
#[derive(Debug)]
pub struct EpochBatches {
    dataset: Arc<Dataset>,
    global_batch_size: usize,
    seed: u64,
    epoch: u64,
    /// Groups of this epoch that were given.
    index: usize,
    /// The groups in this epoch's order.
    order: Vec<usize>,
}

/// The position, and what it is a position of. The batch size is no part of it: a job may resume with another.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Position {
    data: String,
    seed: u64,
    epoch: u64,
    index: usize,
}

impl EpochBatches {
    pub(super) fn new(dataset: Arc<Dataset>, global_batch_size: usize, seed: u64) -> Result<Self> {
        if global_batch_size == 0 {
            return Err(
                Error::new(ErrorKind::Config, "draw_batches", "a batch of no sequences")
                    .with("path", "batch.global_batch_size")
                    .with("expected", "at least 1"),
            );
        }
        if !dataset.records.iter().any(|record| record.scored) {
            let message = "no token of the data file is scored: there is nothing to train on";
            return Err(Error::new(ErrorKind::Data, "draw_batches", message)
                .with("file", dataset.path.display())
                .with("sequences", dataset.num_sequences)
                .with("expected", "a token with a loss mask of 1, not the first of its sequence")
                .help("look at `loss_mask` or `labels`, and whether `data.max_length` cuts completions away"));
        }
        let mut batches = Self {
            dataset,
            global_batch_size,
            seed,
            epoch: 0,
            index: 0,
            order: Vec::new(),
        };
        batches.go_to(0, 0);
        Ok(batches)
    }

    fn go_to(&mut self, epoch: u64, index: usize) {
        let num_groups = self.dataset.num_groups();
        self.order = if self.dataset.shuffle {
            order::shuffled(num_groups, self.seed, epoch)
        } else {
            (0..num_groups).collect()
        };
        (self.epoch, self.index) = (epoch, index);
    }
}

impl BatchSource for EpochBatches {
    fn next_batch(&mut self) -> Result<Batch> {
        let (mut groups, mut taken) = (Vec::new(), 0);
        while taken < self.global_batch_size {
            if self.index == self.order.len() {
                self.go_to(self.epoch + 1, 0);
            }
            let group = self.order[self.index];
            taken += self.dataset.group_size(group);
            groups.push(group);
            self.index += 1;
        }
        self.dataset.assemble(groups)
    }

    fn state(&self) -> Value {
        serde_json::json!({
            "data": self.dataset.identity(),
            "seed": self.seed,
            "epoch": self.epoch,
            "index": self.index,
        })
    }

    fn restore(&mut self, state: &Value) -> Result<()> {
        let failed = |message: &str| Error::new(ErrorKind::Checkpoint, "restore_data", message);
        let position = Position::deserialize(state)
            .map_err(|cause| failed("not a position in a data set").caused_by(cause))?;
        if position.data != self.dataset.identity() {
            return Err(failed("the checkpoint's position is one of other data")
                .with("file", self.dataset.path.display())
                .with("expected", position.data)
                .with("found", self.dataset.identity())
                .help(
                    "resume with the data file, tokenizer and data options that the job began with, \
                     or start a new job from its exported model",
                ));
        }
        if position.seed != self.seed {
            return Err(failed("the checkpoint's position is one of another order")
                .with("path", "seed")
                .with("expected", position.seed)
                .with("found", self.seed)
                .help("resume with the seed that the job began with"));
        }
        if position.index > self.dataset.num_groups() {
            return Err(failed("the checkpoint's position is outside the data")
                .with("expected", format!("at most {}", self.dataset.num_groups()))
                .with("found", position.index));
        }
        self.go_to(position.epoch, position.index);
        Ok(())
    }
}

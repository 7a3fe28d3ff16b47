//! A batch is ragged: sequences end to end, no padding anywhere.

mod build;
mod column;
mod fingerprint;
mod totals;

pub use build::BatchBuilder;
pub use column::{Column, ColumnData, ColumnScope};
pub use totals::BatchTotals;

use std::ops::Range;

use indexmap::IndexMap;

use crate::{Error, ErrorKind, Result};

/// Name of the per-token boolean column (`u8`, 0 or 1) that selects the scored tokens.
pub const LOSS_MASK: &str = "loss_mask";

/// Sequences end to end with their named columns, in host memory.
///
/// Invariants, held by every constructor: `starts` begins at 0, does not decrease and ends at the number of
/// tokens; `groups` and `microbatches` are the same over sequences; every column's length fits its scope.
/// A sequence may be empty of scored tokens, and a batch empty of sequences.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    tokens: Vec<u32>,
    starts: Vec<usize>,
    groups: Vec<usize>,
    microbatches: Vec<usize>,
    columns: IndexMap<String, Column>,
}

impl Batch {
    /// Token ids end to end, `[T]`.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Where each sequence starts in `tokens`, and the end: `[B + 1]`.
    pub fn starts(&self) -> &[usize] {
        &self.starts
    }

    /// Where each group (a DPO pair, the answers to one prompt) starts among the sequences, and the end.
    pub fn groups(&self) -> &[usize] {
        &self.groups
    }

    /// Where each micro-batch starts among the sequences, and the end. One that covers all, unless a
    /// micro-batch plan cut this batch. An empty micro-batch is legal: ranks keep equal counts.
    pub fn microbatches(&self) -> &[usize] {
        &self.microbatches
    }

    /// T.
    pub fn num_tokens(&self) -> usize {
        self.tokens.len()
    }

    /// B.
    pub fn num_sequences(&self) -> usize {
        self.starts.len() - 1
    }

    /// Number of micro-batches.
    pub fn num_microbatches(&self) -> usize {
        self.microbatches.len() - 1
    }

    /// Length of each sequence, `[B]`.
    pub fn lengths(&self) -> Vec<usize> {
        self.starts.windows(2).map(|w| w[1] - w[0]).collect()
    }

    /// The token range of a sequence.
    pub fn sequence(&self, index: usize) -> Range<usize> {
        self.starts[index]..self.starts[index + 1]
    }

    /// Position of each token within its sequence, `[T]`. Positions restart at each sequence.
    pub fn positions(&self) -> Vec<u32> {
        self.starts
            .windows(2)
            .flat_map(|w| 0..(w[1] - w[0]) as u32)
            .collect()
    }

    /// Which tokens are predicted, `[T]`: all but the first of each sequence.
    pub fn predicted(&self) -> Vec<bool> {
        self.positions().into_iter().map(|p| p > 0).collect()
    }

    /// A column by name.
    pub fn column(&self, name: &str) -> Option<&Column> {
        self.columns.get(name)
    }

    /// The token ids of a per-token `I64` column `[T, k]`, and k.
    ///
    /// # Errors
    /// `Data` if there is no such column, or it is not one of ids.
    pub fn token_ids(&self, name: &str) -> Result<(&[i64], usize)> {
        let fault = |message: &str, found: String| {
            Err(Error::new(ErrorKind::Data, "read_ids", message)
                .with("column", name)
                .with("found", found)
                .with("expected", "i64, [T, k], k at least 1"))
        };
        let Some(column) = self.column(name) else {
            let names: Vec<&str> = self.columns().map(|(name, _)| name).collect();
            return fault(
                "the batch lacks the column of token ids",
                format!("{names:?}"),
            );
        };
        match &column.data {
            ColumnData::I64(ids) if column.scope == ColumnScope::Token && column.width() > 0 => {
                Ok((ids, column.width()))
            }
            _ => fault(
                "the column does not hold token ids",
                format!(
                    "{}, {:?}, rows of {:?}",
                    column.dtype(),
                    column.scope,
                    column.trailing
                ),
            ),
        }
    }

    /// All columns, in the order they were added.
    pub fn columns(&self) -> impl Iterator<Item = (&str, &Column)> {
        self.columns
            .iter()
            .map(|(name, column)| (name.as_str(), column))
    }

    /// Adds or replaces a column after checking its length.
    ///
    /// # Errors
    /// `Data` if the column's length does not fit its scope, or a loss mask is not a 0 or 1 (`u8`) a token.
    pub fn set_column(&mut self, name: impl Into<String>, column: Column) -> Result<()> {
        let name = name.into();
        column.check(&name, self.num_tokens(), self.num_sequences())?;
        if name == LOSS_MASK {
            column.check_mask()?;
        }
        self.columns.insert(name, column);
        Ok(())
    }

    /// Which tokens are scored, `[T]`: the loss mask (all, where there is none), never a sequence's first token.
    pub fn scored(&self) -> Vec<bool> {
        let mut scored = match self.column(LOSS_MASK).map(|c| &c.data) {
            Some(ColumnData::U8(mask)) => mask.iter().map(|&m| m != 0).collect(),
            _ => vec![true; self.num_tokens()],
        };
        for w in self.starts.windows(2) {
            if w[0] < w[1] {
                scored[w[0]] = false;
            }
        }
        scored
    }

    /// The sequences with these indices, in this order, as one micro-batch. Groups are kept where all their
    /// sequences are taken in a row; every other sequence becomes a group of its own.
    pub fn select(&self, sequences: &[usize]) -> Batch {
        build::select(self, sequences)
    }

    /// Every micro-batch as a batch of its own; an empty one where there is none, so that ranks without data
    /// take part.
    pub fn iter_microbatches(&self) -> impl Iterator<Item = Batch> {
        (0..self.num_microbatches().max(1)).map(|index| match self.num_microbatches() {
            0 => self.select(&[]),
            _ => self.microbatch(index),
        })
    }

    /// One micro-batch as a batch of its own.
    pub fn microbatch(&self, index: usize) -> Batch {
        let range = self.microbatches[index]..self.microbatches[index + 1];
        self.select(&range.collect::<Vec<_>>())
    }
}

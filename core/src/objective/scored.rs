//! What a batch holds in its scored slots, checked; what stands in any other slot is never looked at.

use super::{OLD_LOG_PROBS, REFERENCE_LOG_PROBS, Requirements};
use crate::{
    Error, ErrorKind, Result,
    batch::{Batch, ColumnScope},
};

/// A sequence with at least one scored token.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ScoredSequence {
    /// Its index in the batch.
    pub(super) index: usize,
    /// Its scored tokens, as indices into `[T]`.
    pub(super) slots: Vec<usize>,
}

/// The scored slots of a batch, read on behalf of an objective.
///
/// What it hands out, `[T]`, holds finite numbers in scored slots and 0 in all others: masks select.
#[derive(Debug)]
pub(super) struct Scored<'a> {
    objective: &'a str,
    batch: &'a Batch,
    sequences: Vec<ScoredSequence>,
}

impl<'a> Scored<'a> {
    pub(super) fn new(objective: &'a str, batch: &'a Batch) -> Self {
        let scored = batch.scored();
        let sequences = (0..batch.num_sequences())
            .map(|index| ScoredSequence {
                index,
                slots: batch.sequence(index).filter(|&t| scored[t]).collect(),
            })
            .filter(|sequence| !sequence.slots.is_empty())
            .collect();
        Self {
            objective,
            batch,
            sequences,
        }
    }

    pub(super) fn batch(&self) -> &'a Batch {
        self.batch
    }

    /// The scored sequences, in the batch's order.
    pub(super) fn sequences(&self) -> &[ScoredSequence] {
        &self.sequences
    }

    /// All scored tokens, as indices into `[T]`.
    pub(super) fn slots(&self) -> Vec<usize> {
        self.sequences
            .iter()
            .flat_map(|s| &s.slots)
            .copied()
            .collect()
    }

    /// A column of one number a row, `[T]`; one of a number a sequence is repeated over its tokens.
    pub(super) fn column(&self, name: &str) -> Result<Vec<f64>> {
        let column = self.batch.column(name).ok_or_else(|| {
            let message = format!(
                "the objective `{}` needs the column `{name}`, which the batch lacks",
                self.objective
            );
            self.data_error(message, name)
        })?;
        if column.width() != 1 {
            return Err(self
                .data_error("the column must hold one number a row", name)
                .with("expected", "trailing shape []")
                .with("found", format!("trailing shape {:?}", column.trailing)));
        }
        self.select(name, &column.to_f64(), column.scope)
    }

    /// Checks the columns that an objective reads: there, and finite where scored. Log-probs under other weights
    /// may still be missing: the loop can have the engine compute them after `prepare`.
    pub(super) fn check_columns(&self, requirements: &Requirements) -> Result<()> {
        let comes_later = |name: &str| name == OLD_LOG_PROBS || name == REFERENCE_LOG_PROBS;
        let mut columns = requirements.columns.iter();
        columns.try_for_each(|name| match self.batch.column(name) {
            None if comes_later(name) => Ok(()),
            _ => self.column(name).map(drop),
        })
    }

    /// The scored slots of a row of numbers a token `[T]` or a sequence `[B]`.
    pub(super) fn select(
        &self,
        name: &str,
        values: &[f64],
        scope: ColumnScope,
    ) -> Result<Vec<f64>> {
        let expected = match scope {
            ColumnScope::Token => self.batch.num_tokens(),
            ColumnScope::Sequence => self.batch.num_sequences(),
        };
        if values.len() != expected {
            return Err(Error::new(
                ErrorKind::Defect,
                "evaluate_objective",
                "the engine's output does not fit the micro-batch",
            )
            .with("objective", self.objective)
            .with("output", name)
            .with("expected", expected)
            .with("found", values.len()));
        }
        let mut selected = vec![0.0; self.batch.num_tokens()];
        for sequence in &self.sequences {
            for &slot in &sequence.slots {
                let row = match scope {
                    ColumnScope::Token => slot,
                    ColumnScope::Sequence => sequence.index,
                };
                self.check(name, slot, values[row])?;
                selected[slot] = values[row];
            }
        }
        Ok(selected)
    }

    /// Refuses a number that is not finite, naming the place.
    pub(super) fn check(&self, what: &str, slot: usize, value: f64) -> Result<()> {
        if value.is_finite() {
            return Ok(());
        }
        let sequence = self.batch.starts().partition_point(|&start| start <= slot) - 1;
        Err(Error::new(
            ErrorKind::NonFinite,
            "evaluate_objective",
            "a value of a scored token is not finite",
        )
        .with("objective", self.objective)
        .with("column", what)
        .with("sequence", sequence)
        .with("position", slot - self.batch.sequence(sequence).start)
        .with("found", value))
    }

    /// An error about a column.
    pub(super) fn data_error(&self, message: impl Into<String>, column: &str) -> Error {
        Error::new(ErrorKind::Data, "evaluate_objective", message)
            .with("objective", self.objective)
            .with("column", column)
    }
}

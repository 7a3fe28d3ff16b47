//! The frame of every built-in evaluation: selects the scored slots, checks them, sums loss and derivatives.
#![allow(
    dead_code,
    reason = "the objectives that read columns and entropy come next"
)]

use std::ops::Range;

use super::{ObjectiveValue, TokenOutputs};
use crate::{
    Error, ErrorKind, Result,
    batch::{Batch, Column, ColumnScope},
    metrics::Metrics,
};

/// A sequence with at least one scored token.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ScoredSequence {
    /// Its index in the micro-batch.
    pub(super) index: usize,
    /// Its scored tokens, as indices into `[T]`.
    pub(super) slots: Vec<usize>,
}

/// The scored sequences of a batch, in order.
pub(super) fn scored_sequences(batch: &Batch) -> Vec<ScoredSequence> {
    let scored = batch.scored();
    (0..batch.num_sequences())
        .map(|index| ScoredSequence {
            index,
            slots: batch.sequence(index).filter(|&t| scored[t]).collect(),
        })
        .filter(|sequence| !sequence.slots.is_empty())
        .collect()
}

/// Reads the inputs of one micro-batch and collects its loss.
///
/// Whatever it hands out, `[T]`, holds checked finite numbers in scored slots and 0 in all others: masks
/// select, so nothing that stands in a masked slot can reach the loss.
#[derive(Debug)]
pub(super) struct Evaluation<'a> {
    objective: &'a str,
    batch: &'a Batch,
    outputs: &'a TokenOutputs,
    sequences: Vec<ScoredSequence>,
    value: ObjectiveValue,
}

impl<'a> Evaluation<'a> {
    pub(super) fn new(objective: &'a str, batch: &'a Batch, outputs: &'a TokenOutputs) -> Self {
        Self {
            objective,
            batch,
            outputs,
            sequences: scored_sequences(batch),
            value: ObjectiveValue {
                d_log_probs: vec![0.0; batch.num_tokens()],
                ..ObjectiveValue::default()
            },
        }
    }

    pub(super) fn sequences(&self) -> Vec<ScoredSequence> {
        self.sequences.clone()
    }

    /// The log-probs that the engine computed, `[T]`.
    pub(super) fn log_probs(&self) -> Result<Vec<f64>> {
        self.select("log_probs", &self.outputs.log_probs, ColumnScope::Token)
    }

    /// The entropies that the engine computed, `[T]`.
    pub(super) fn entropy(&self) -> Result<Vec<f64>> {
        let entropy = self.outputs.entropy.as_deref().unwrap_or_default();
        self.select("entropy", entropy, ColumnScope::Token)
    }

    /// A column spread over tokens, `[T]`; one of a value a sequence is repeated.
    pub(super) fn column(&self, name: &str) -> Result<Vec<f64>> {
        let column = scalar_column(self.objective, self.batch, name)?;
        self.select(name, &column.to_f64(), column.scope)
    }

    /// Adds a token's part of the loss and its derivative by the log-prob.
    pub(super) fn add(&mut self, slot: usize, loss: f64, d_log_prob: f64) -> Result<()> {
        self.add_loss(slot, loss)?;
        self.check("the loss's derivative", slot, d_log_prob)?;
        self.value.d_log_probs[slot] += d_log_prob;
        Ok(())
    }

    /// Adds a token's part of the loss and its derivative by the entropy.
    pub(super) fn add_entropy(&mut self, slot: usize, loss: f64, d_entropy: f64) -> Result<()> {
        self.add_loss(slot, loss)?;
        let num_tokens = self.batch.num_tokens();
        self.value
            .d_entropy
            .get_or_insert_with(|| vec![0.0; num_tokens])[slot] += d_entropy;
        Ok(())
    }

    pub(super) fn metrics(&mut self) -> &mut Metrics {
        &mut self.value.metrics
    }

    pub(super) fn finish(self) -> ObjectiveValue {
        self.value
    }

    fn add_loss(&mut self, slot: usize, loss: f64) -> Result<()> {
        self.check("the loss", slot, loss)?;
        self.value.loss += loss;
        Ok(())
    }

    fn select(&self, name: &str, values: &[f64], scope: ColumnScope) -> Result<Vec<f64>> {
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
                selected[slot] = match scope {
                    ColumnScope::Token => values[slot],
                    ColumnScope::Sequence => values[sequence.index],
                };
                self.check(name, slot, selected[slot])?;
            }
        }
        Ok(selected)
    }

    fn check(&self, what: &str, slot: usize, value: f64) -> Result<()> {
        if value.is_finite() {
            Ok(())
        } else {
            Err(non_finite(self.objective, self.batch, what, slot, value))
        }
    }
}

/// A column of one number a row.
pub(super) fn scalar_column<'b>(
    objective: &str,
    batch: &'b Batch,
    name: &str,
) -> Result<&'b Column> {
    let column = batch
        .column(name)
        .ok_or_else(|| missing_column(objective, name))?;
    if column.width() == 1 {
        return Ok(column);
    }
    Err(Error::new(
        ErrorKind::Data,
        "evaluate_objective",
        "the column must hold one number a row",
    )
    .with("objective", objective)
    .with("column", name)
    .with("expected", "trailing shape []")
    .with("found", format!("trailing shape {:?}", column.trailing)))
}

pub(super) fn missing_column(objective: &str, name: &str) -> Error {
    Error::new(
        ErrorKind::Data,
        "evaluate_objective",
        format!("the objective `{objective}` needs the column `{name}`, which the batch lacks"),
    )
    .with("objective", objective)
    .with("column", name)
}

fn non_finite(objective: &str, batch: &Batch, what: &str, slot: usize, value: f64) -> Error {
    let sequence = batch.starts().partition_point(|&start| start <= slot) - 1;
    let Range { start, .. } = batch.sequence(sequence);
    Error::new(
        ErrorKind::NonFinite,
        "evaluate_objective",
        "a value of a scored token is not finite",
    )
    .with("objective", objective)
    .with("column", what)
    .with("sequence", sequence)
    .with("position", slot - start)
    .with("found", value)
}

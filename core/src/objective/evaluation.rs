//! The frame of every built-in evaluation: reads the scored slots, sums loss and derivatives.

use super::{ObjectiveValue, TokenOutputs, scored::Scored};
use crate::{
    Result,
    batch::{Batch, ColumnScope},
    metrics::Metrics,
};

/// Reads the inputs of one micro-batch and collects its loss.
#[derive(Debug)]
pub(super) struct Evaluation<'a> {
    /// The scored slots, and the columns there.
    pub(super) scored: Scored<'a>,
    outputs: &'a TokenOutputs,
    value: ObjectiveValue,
}

impl<'a> Evaluation<'a> {
    pub(super) fn new(objective: &'a str, batch: &'a Batch, outputs: &'a TokenOutputs) -> Self {
        Self {
            scored: Scored::new(objective, batch),
            outputs,
            value: ObjectiveValue {
                d_log_probs: vec![0.0; batch.num_tokens()],
                ..ObjectiveValue::default()
            },
        }
    }

    /// The log-probs that the engine computed, `[T]`.
    pub(super) fn log_probs(&self) -> Result<Vec<f64>> {
        self.scored
            .select("log_probs", &self.outputs.log_probs, ColumnScope::Token)
    }

    /// The entropies that the engine computed, `[T]`.
    pub(super) fn entropy(&self) -> Result<Vec<f64>> {
        let entropy = self.outputs.entropy.as_deref().unwrap_or_default();
        self.scored.select("entropy", entropy, ColumnScope::Token)
    }

    /// Adds to the loss; the slot is where an error would point.
    pub(super) fn add_loss(&mut self, slot: usize, loss: f64) -> Result<()> {
        self.scored.check("the loss", slot, loss)?;
        self.value.loss += loss;
        Ok(())
    }

    /// Adds to the derivative by a token's log-prob.
    pub(super) fn add_d_log_prob(&mut self, slot: usize, derivative: f64) -> Result<()> {
        self.scored
            .check("the loss's derivative", slot, derivative)?;
        self.value.d_log_probs[slot] += derivative;
        Ok(())
    }

    /// Sets the derivatives by the entropies, `[T]`.
    pub(super) fn set_d_entropy(&mut self, derivatives: Vec<f64>) {
        self.value.d_entropy = Some(derivatives);
    }

    pub(super) fn metrics(&mut self) -> &mut Metrics {
        &mut self.value.metrics
    }

    pub(super) fn finish(self) -> ObjectiveValue {
        self.value
    }
}

//! What an engine reports.

use serde::{Deserialize, Serialize};

use crate::{Result, communicator::Communicator, metrics::Metrics};

/// After `forward_backward`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ForwardBackwardReport {
    /// The global loss: summed over micro-batches and data-parallel ranks, the same on every rank.
    pub loss: f64,
    /// The objective's metrics, combined likewise.
    pub metrics: Metrics,
    /// Seconds this rank spent.
    pub seconds: f64,
}

impl ForwardBackwardReport {
    /// Combines loss and metrics over the data-parallel ranks. Collective.
    ///
    /// # Errors
    /// The communicator's.
    pub fn all_reduce(&mut self, data: &dyn Communicator) -> Result<()> {
        let mut loss = [self.loss];
        data.sum_f64(&mut loss)?;
        self.loss = loss[0];
        self.metrics.all_reduce(data)
    }
}

/// After `optim_step`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OptimReport {
    /// Committed steps, this one included unless skipped.
    pub step: u64,
    /// 2-norm of the whole gradient before clipping, each parameter counted once; NaN or infinite if skipped.
    pub grad_norm: f64,
    /// What the gradient was multiplied by: `min(1, max_norm / (grad_norm + 1e-6))`, or 1 without a limit or
    /// where the step was skipped.
    pub clip_factor: f64,
    /// Whether a non-finite gradient made every rank skip.
    pub skipped: bool,
    /// Learning rate used.
    pub learning_rate: f64,
}

/// Bytes one rank holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryReport {
    /// Weights kept between steps (snapshots apart).
    pub parameters: u64,
    /// Gradients.
    pub gradients: u64,
    /// Master weights and moments.
    pub optimizer: u64,
    /// Snapshots.
    pub snapshots: u64,
    /// Most bytes of activations and buffers held at once, where the engine counts them; else 0.
    pub peak_activations: u64,
}

//! What an engine reports.

use serde::{Deserialize, Serialize};

use crate::{Result, communicator::Communicator, metrics::Metrics};

/// After `forward_backward`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ForwardBackwardReport {
    /// The global loss: summed over micro-batches and data-parallel ranks, the same on every rank.
    pub loss: f64,
    /// The objective's metrics, combined likewise, and those of the router's losses
    /// ([`LOAD_BALANCING_LOSS`](crate::moe::LOAD_BALANCING_LOSS), [`ROUTER_Z_LOSS`](crate::moe::ROUTER_Z_LOSS)),
    /// which are not part of `loss`.
    pub metrics: Metrics,
    /// How many of the [counted](crate::moe::CountedTokens) tokens each expert got, by layer; empty for a layer
    /// without experts, and at all for a model without.
    pub expert_tokens: Vec<Vec<u64>>,
    /// Seconds this rank spent.
    pub seconds: f64,
}

impl ForwardBackwardReport {
    /// Combines loss, metrics and the experts' tokens over the data-parallel ranks. Collective; every rank has as
    /// many layers and experts.
    ///
    /// # Errors
    /// The communicator's.
    pub fn all_reduce(&mut self, data: &dyn Communicator) -> Result<()> {
        // Counts are far below 2^53, where f64 stops being exact.
        let counts = self.expert_tokens.iter().flatten().map(|&n| n as f64);
        let mut sums: Vec<_> = std::iter::once(self.loss).chain(counts).collect();
        data.sum_f64(&mut sums)?;
        self.loss = sums[0];
        let counts = self.expert_tokens.iter_mut().flatten();
        counts.zip(&sums[1..]).for_each(|(n, &sum)| *n = sum as u64);
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
    /// Most bytes that the layers kept of one micro-batch from their forward to their backward, where the engine
    /// counts them; else 0. The layers of one chunk, where they are interleaved; the head is not among them.
    pub saved_activations: u64,
}

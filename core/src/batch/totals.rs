//! What a loss is divided by: counted over the whole global batch, before it is cut.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::Batch;

/// Counts over the global batch. Every micro-batch, data-parallel rank and context-parallel shard divides its
/// SUM by these, so the loss does not depend on how the batch is cut.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct BatchTotals {
    /// Scored tokens.
    pub tokens: u64,
    /// Sequences with at least one scored token.
    pub sequences: u64,
    /// Named weights that an objective added in `prepare`.
    pub named: BTreeMap<String, f64>,
}

impl BatchTotals {
    /// Counts a global batch.
    pub fn count(global: &Batch) -> Self {
        let scored = global.scored();
        let per_sequence = (0..global.num_sequences())
            .map(|s| scored[global.sequence(s)].iter().filter(|&&m| m).count() as u64);
        let (tokens, sequences) =
            per_sequence.fold((0, 0), |(t, s), n| (t + n, s + u64::from(n > 0)));
        Self {
            tokens,
            sequences,
            named: BTreeMap::new(),
        }
    }

    /// The sum of two disjoint parts.
    #[must_use]
    pub fn merge(mut self, other: &Self) -> Self {
        self.tokens += other.tokens;
        self.sequences += other.sequences;
        for (name, value) in &other.named {
            *self.named.entry(name.clone()).or_default() += value;
        }
        self
    }
}

//! A micro-batch as the modules see it: tokens end to end, positions, and which rows the head scores.

use drivetrain_core::batch::Batch;
use drivetrain_kernels::ops::attention::Span;

/// One micro-batch of T tokens.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Packed {
    /// Token ids, `[T]`, each below V.
    pub(crate) tokens: Vec<u32>,
    /// Where each sequence starts, and T: `[B + 1]`.
    pub(crate) starts: Vec<usize>,
    /// Position within its sequence, `[T]`.
    pub(crate) positions: Vec<u32>,
    /// Index of each scored token, `[N]`.
    pub(crate) scored: Vec<usize>,
    /// The row whose hidden state predicts it: the one before, `[N]`.
    pub(crate) rows: Vec<u32>,
    /// Its id, `[N]`.
    pub(crate) targets: Vec<u32>,
}

impl Packed {
    /// A micro-batch of which the tokens in `scored` (never a sequence's first) are scored.
    pub(crate) fn new(microbatch: &Batch, scored: &[bool]) -> Self {
        let tokens = microbatch.tokens().to_vec();
        let scored: Vec<usize> = (1..tokens.len()).filter(|&t| scored[t]).collect();
        Self {
            rows: scored.iter().map(|&t| t as u32 - 1).collect(),
            targets: scored.iter().map(|&t| tokens[t]).collect(),
            scored,
            positions: microbatch.positions(),
            starts: microbatch.starts().to_vec(),
            tokens,
        }
    }

    /// T.
    pub(crate) fn num_tokens(&self) -> usize {
        self.tokens.len()
    }

    /// N.
    pub(crate) fn num_scored(&self) -> usize {
        self.scored.len()
    }

    /// Each sequence attends to itself.
    pub(crate) fn spans(&self) -> Vec<Span> {
        Span::packed(&self.starts)
    }

    /// The longest sequence.
    pub(crate) fn max_length(&self) -> usize {
        self.starts
            .windows(2)
            .map(|w| w[1] - w[0])
            .max()
            .unwrap_or(0)
    }

    /// Spreads a value a scored token over all tokens, 0 elsewhere: `[N]` to `[T]`.
    pub(crate) fn spread(&self, values: impl IntoIterator<Item = f32>) -> Vec<f64> {
        let mut all = vec![0.0; self.num_tokens()];
        for (&t, value) in self.scored.iter().zip(values) {
            all[t] = f64::from(value);
        }
        all
    }

    /// The values of the scored tokens: `[T]` to `[N]`.
    pub(crate) fn gather(&self, values: &[f64]) -> Vec<f32> {
        self.scored.iter().map(|&t| values[t] as f32).collect()
    }
}

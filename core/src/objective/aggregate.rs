//! What each token weighs in the loss: the sum is divided by totals of the whole global batch.

use super::scored::Scored;
use crate::{
    Error, ErrorKind, Result,
    batch::BatchTotals,
    config::{LossAggregation, ObjectiveConfig},
};

/// How tokens and sequences are averaged. Every form is a sum with per-token weights that do not depend on
/// how the global batch is cut.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Aggregation {
    /// Each scored token weighs `1 / scored tokens`.
    TokenMean,
    /// Each weighs `1 / (scored tokens of its sequence * scored sequences)`.
    SequenceMean,
    /// Each weighs `1 / divisor`.
    Constant(f64),
}

impl Aggregation {
    /// What the config says, or `default`. A constant without a divisor divides by 1.
    pub fn from_config(config: &ObjectiveConfig, default: Self) -> Self {
        match config.aggregation {
            None => default,
            Some(LossAggregation::TokenMean) => Self::TokenMean,
            Some(LossAggregation::SequenceMean) => Self::SequenceMean,
            Some(LossAggregation::Constant) => Self::Constant(config.divisor.unwrap_or(1.0)),
        }
    }

    /// The weight of each token of a sequence with `scored` scored tokens, at least one.
    ///
    /// # Errors
    /// `CallOrder` if the totals count nothing although something is scored: they are those of another batch.
    pub fn token_weight(self, scored: usize, totals: &BatchTotals) -> Result<f64> {
        let divisor = match self {
            Self::TokenMean => totals.tokens as f64,
            Self::SequenceMean => totals.sequences as f64 * scored as f64,
            Self::Constant(divisor) => divisor,
        };
        if divisor > 0.0 {
            return Ok(1.0 / divisor);
        }
        Err(Error::new(
            ErrorKind::CallOrder,
            "evaluate_objective",
            "the totals count nothing, but the micro-batch has scored tokens",
        )
        .with("totals.tokens", totals.tokens)
        .with("totals.sequences", totals.sequences)
        .help("count the totals over the whole global batch before it is cut"))
    }

    /// The weight of each token, `[T]`; 0 where unscored.
    pub(super) fn weights(self, scored: &Scored<'_>, totals: &BatchTotals) -> Result<Vec<f64>> {
        let mut weights = vec![0.0; scored.batch().num_tokens()];
        for sequence in scored.sequences() {
            let weight = self.token_weight(sequence.slots.len(), totals)?;
            for &slot in &sequence.slots {
                weights[slot] = weight;
            }
        }
        Ok(weights)
    }
}

//! Clipped importance-sampling-weight policy optimization (MiniMax 2025, MiniMax-M1).

use super::{
    ADVANTAGES, Aggregation, Clip, Evaluation, OLD_LOG_PROBS, Objective, ObjectiveValue,
    Requirements, Terms, TokenOutputs,
    group::prepare_advantages,
    ratio::{RatioInputs, RatioStatistics},
};
use crate::{
    Result,
    batch::{Batch, BatchTotals},
};

/// `- sum_t w_t stop_gradient(clip(r_t)) A_t log_prob_t` (MiniMax 2025, equations 4 and 5): the ratio is a
/// weight, clipped but never differentiated, so that no token loses its gradient.
///
/// Columns as for GRPO ([`super::ClippedSurrogate::grpo`]).
#[derive(Debug, Clone, PartialEq)]
pub struct Cispo {
    /// Bounds of the weight. By default `[0, 5]`: the paper sets no lower bound and tunes the upper one.
    pub clip: Clip,
    /// Aggregation (`TokenMean` by default), temperature, added terms.
    pub terms: Terms,
}

impl Default for Cispo {
    fn default() -> Self {
        Self {
            clip: Clip {
                low: 1.0,
                high: 4.0,
            },
            terms: Terms::new(Aggregation::TokenMean),
        }
    }
}

impl Objective for Cispo {
    fn name(&self) -> &str {
        "cispo"
    }

    fn requires(&self) -> Requirements {
        self.terms.requires(&[ADVANTAGES, OLD_LOG_PROBS])
    }

    fn prepare(&self, global: &mut Batch, _totals: &mut BatchTotals) -> Result<()> {
        prepare_advantages(self, global)
    }

    fn evaluate(
        &self,
        microbatch: &Batch,
        outputs: &TokenOutputs,
        totals: &BatchTotals,
    ) -> Result<ObjectiveValue> {
        let mut evaluation = Evaluation::new(self.name(), microbatch, outputs);
        let inputs = RatioInputs::read(&evaluation, &self.terms, totals)?;
        let mut statistics = RatioStatistics::default();
        for slot in evaluation.scored.slots() {
            let log_ratio = inputs.log_ratio(slot);
            let ratio = log_ratio.exp();
            let importance = self.clip.apply(ratio);
            let derivative = -inputs.weights[slot] * importance * inputs.advantages[slot];
            evaluation.add_loss(slot, derivative * inputs.log_probs[slot])?;
            evaluation.add_d_log_prob(slot, derivative)?;
            statistics.add(log_ratio, importance != ratio);
        }
        statistics.record(&mut evaluation);
        self.terms
            .add(&mut evaluation, &inputs.weights, &inputs.log_probs)?;
        Ok(evaluation.finish())
    }
}

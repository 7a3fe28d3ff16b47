//! Proximal policy optimization (Schulman et al. 2017).

use super::{
    ADVANTAGES, Aggregation, Clip, Evaluation, OLD_LOG_PROBS, Objective, ObjectiveValue,
    Requirements, Terms, TokenOutputs, ratio::clipped_token_loss, scored::Scored,
};
use crate::{
    Result,
    batch::{Batch, BatchTotals},
};

/// `- sum_t w_t min(r_t A_t, clip(r_t) A_t)` with `r_t = exp(log_prob_t - old_log_prob_t)` and the weights of
/// the aggregation; with `dual_clip = c` a negative advantage costs at most `-c A_t` (Ye et al. 2020).
///
/// Reads the columns `advantages` and `old_log_probs`. A value function's loss is not part of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Ppo {
    /// Bounds of the ratio; 0.2 both ways by default.
    pub clip: Clip,
    /// Bound on the ratio for negative advantages, above 1.
    pub dual_clip: Option<f64>,
    /// Aggregation (`TokenMean` by default), temperature, added terms.
    pub terms: Terms,
}

impl Default for Ppo {
    fn default() -> Self {
        Self {
            clip: Clip {
                low: 0.2,
                high: 0.2,
            },
            dual_clip: None,
            terms: Terms::new(Aggregation::TokenMean),
        }
    }
}

impl Objective for Ppo {
    fn name(&self) -> &str {
        "ppo"
    }

    fn requires(&self) -> Requirements {
        self.terms.requires(&[ADVANTAGES, OLD_LOG_PROBS])
    }

    fn prepare(&self, global: &mut Batch, _totals: &mut BatchTotals) -> Result<()> {
        Scored::new(self.name(), global).check_columns(&self.requires())
    }

    fn evaluate(
        &self,
        microbatch: &Batch,
        outputs: &TokenOutputs,
        totals: &BatchTotals,
    ) -> Result<ObjectiveValue> {
        let evaluation = Evaluation::new(self.name(), microbatch, outputs);
        clipped_token_loss(evaluation, self.clip, self.dual_clip, &self.terms, totals)
    }
}

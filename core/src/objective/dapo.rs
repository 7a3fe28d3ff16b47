//! Decoupled clip and dynamic sampling policy optimization (Yu et al. 2025).

use super::{
    ADVANTAGES, Aggregation, Clip, Evaluation, OLD_LOG_PROBS, Objective, ObjectiveValue,
    Requirements, Terms, TokenOutputs, group::prepare_advantages, ratio::clipped_token_loss,
};
use crate::{
    Result,
    batch::{Batch, BatchTotals},
};

/// GRPO with a higher upper clip ("clip-higher"), the mean over all tokens instead of over answers, and no KL
/// term by default (Yu et al. 2025, equation 8). Dynamic sampling and the shaping of over-long answers are
/// choices of the batch, so they belong to the loop that makes it.
///
/// Columns as for [`super::Grpo`].
#[derive(Debug, Clone, PartialEq)]
pub struct Dapo {
    /// Bounds of the ratio; 0.2 down and 0.28 up by default.
    pub clip: Clip,
    /// Bound on the ratio for negative advantages, above 1.
    pub dual_clip: Option<f64>,
    /// Aggregation (`TokenMean` by default), temperature, added terms.
    pub terms: Terms,
}

impl Default for Dapo {
    fn default() -> Self {
        Self {
            clip: Clip {
                low: 0.2,
                high: 0.28,
            },
            dual_clip: None,
            terms: Terms::new(Aggregation::TokenMean),
        }
    }
}

impl Objective for Dapo {
    fn name(&self) -> &str {
        "dapo"
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
        let evaluation = Evaluation::new(self.name(), microbatch, outputs);
        clipped_token_loss(evaluation, self.clip, self.dual_clip, &self.terms, totals)
    }
}

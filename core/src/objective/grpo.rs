//! Group-relative policy optimization (Shao et al. 2024, DeepSeekMath).

use super::{
    ADVANTAGES, Aggregation, Clip, Evaluation, OLD_LOG_PROBS, Objective, ObjectiveValue,
    Requirements, Terms, TokenOutputs, group::prepare_advantages, ratio::clipped_token_loss,
};
use crate::{
    Result,
    batch::{Batch, BatchTotals},
};

/// PPO's clipped surrogate with advantages relative to the group: the answers to one prompt.
///
/// Shao et al. 2024, equation 3: token mean within an answer, then the mean over answers (`SequenceMean`), and
/// a KL term to the reference (k3) where asked for. Reads `old_log_probs` and `advantages`; where the batch
/// has no advantages, [`Objective::prepare`] makes them of the per-sequence column `rewards`, see
/// [`super::group_advantages`].
#[derive(Debug, Clone, PartialEq)]
pub struct Grpo {
    /// Bounds of the ratio; 0.2 both ways by default.
    pub clip: Clip,
    /// Bound on the ratio for negative advantages, above 1.
    pub dual_clip: Option<f64>,
    /// Aggregation (`SequenceMean` by default), temperature, added terms.
    pub terms: Terms,
}

impl Default for Grpo {
    fn default() -> Self {
        Self {
            clip: Clip {
                low: 0.2,
                high: 0.2,
            },
            dual_clip: None,
            terms: Terms::new(Aggregation::SequenceMean),
        }
    }
}

impl Objective for Grpo {
    fn name(&self) -> &str {
        "grpo"
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

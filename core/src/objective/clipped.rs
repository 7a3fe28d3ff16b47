//! The clipped surrogate token by token: PPO (Schulman et al. 2017) and what differs from it by where advantages
//! come from, how tokens are weighed and how far the clip reaches.

use super::{
    ADVANTAGES, Aggregation, Clip, Evaluation, OLD_LOG_PROBS, Objective, ObjectiveValue,
    Requirements, Terms, TokenOutputs,
    group::prepare_advantages,
    ratio::{RatioInputs, RatioStatistics},
    scored::Scored,
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
pub struct ClippedSurrogate {
    /// What it is called.
    pub name: &'static str,
    /// Whether a batch without `advantages` gets them of its per-sequence column `rewards`, relative to the group: the
    /// answers to one prompt, see [`super::group_advantages`].
    pub group_relative: bool,
    /// Bounds of the ratio.
    pub clip: Clip,
    /// Bound on the ratio for negative advantages, above 1.
    pub dual_clip: Option<f64>,
    /// Aggregation, temperature, added terms.
    pub terms: Terms,
}

impl ClippedSurrogate {
    /// PPO (Schulman et al. 2017, equation 7): given advantages, mean over tokens, 0.2 both ways.
    pub fn ppo() -> Self {
        Self {
            name: "ppo",
            group_relative: false,
            clip: Clip {
                low: 0.2,
                high: 0.2,
            },
            dual_clip: None,
            terms: Terms::new(Aggregation::TokenMean),
        }
    }

    /// GRPO (Shao et al. 2024, DeepSeekMath, equation 3): advantages relative to the group, token mean within an answer,
    /// then the mean over answers (`SequenceMean`), and a KL term to the reference (k3) where asked for.
    pub fn grpo() -> Self {
        Self {
            name: "grpo",
            group_relative: true,
            terms: Terms::new(Aggregation::SequenceMean),
            ..Self::ppo()
        }
    }

    /// DAPO (Yu et al. 2025, equation 8): GRPO with a higher upper clip ("clip-higher", 0.28), the mean over all tokens
    /// instead of over answers, and no KL term by default. Dynamic sampling and the shaping of over-long answers are
    /// choices of the batch, so they belong to the loop that makes it.
    pub fn dapo() -> Self {
        Self {
            name: "dapo",
            group_relative: true,
            clip: Clip {
                low: 0.2,
                high: 0.28,
            },
            ..Self::ppo()
        }
    }
}

impl Objective for ClippedSurrogate {
    fn name(&self) -> &str {
        self.name
    }

    fn requires(&self) -> Requirements {
        self.terms.requires(&[ADVANTAGES, OLD_LOG_PROBS])
    }

    fn prepare(&self, global: &mut Batch, _totals: &mut BatchTotals) -> Result<()> {
        match self.group_relative {
            true => prepare_advantages(self, global),
            false => Scored::new(self.name, global).check_columns(&self.requires()),
        }
    }

    fn evaluate(
        &self,
        microbatch: &Batch,
        outputs: &TokenOutputs,
        totals: &BatchTotals,
    ) -> Result<ObjectiveValue> {
        let mut evaluation = Evaluation::new(self.name, microbatch, outputs);
        let inputs = RatioInputs::read(&evaluation, &self.terms, totals)?;
        let mut statistics = RatioStatistics::default();
        for slot in evaluation.scored.slots() {
            let log_ratio = inputs.log_ratio(slot);
            let advantage = inputs.advantages[slot];
            let surrogate = self.clip.surrogate(log_ratio, advantage, self.dual_clip);
            let weight = inputs.weights[slot];
            evaluation.add_loss(slot, weight * surrogate.loss)?;
            evaluation.add_d_log_prob(slot, weight * surrogate.d_log_ratio)?;
            statistics.add(log_ratio, surrogate.clipped);
        }
        statistics.record(&mut evaluation);
        self.terms
            .add(&mut evaluation, &inputs.weights, &inputs.log_probs)?;
        Ok(evaluation.finish())
    }
}

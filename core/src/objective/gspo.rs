//! Group sequence policy optimization (Zheng et al. 2025).

use super::{
    ADVANTAGES, Aggregation, Clip, Evaluation, OLD_LOG_PROBS, Objective, ObjectiveValue,
    Requirements, Terms, TokenOutputs,
    group::prepare_advantages,
    ratio::{RatioInputs, RatioStatistics},
    scored::ScoredSequence,
};
use crate::{
    Result,
    batch::{Batch, BatchTotals},
};

/// PPO's clipped surrogate with one ratio a sequence (Zheng et al. 2025, equations 5 and 7):
/// `s = exp(mean_t (log_prob_t - old_log_prob_t))` over the scored tokens, clipped as a whole. The gradient goes
/// through the ratio to every scored token alike: `d s / d log_prob_t = s / n`.
///
/// The aggregation weighs a sequence with the sum of its tokens' weights: `SequenceMean`, the paper's, is the
/// plain mean over sequences. Columns as for GRPO ([`super::ClippedSurrogate::grpo`]), the advantage being one number a sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct Gspo {
    /// Bounds of the sequence's ratio; 3e-4 down and 4e-4 up by default (section 5.1 of the paper).
    pub clip: Clip,
    /// Aggregation (`SequenceMean` by default), temperature, added terms.
    pub terms: Terms,
}

impl Default for Gspo {
    fn default() -> Self {
        Self {
            clip: Clip {
                low: 3e-4,
                high: 4e-4,
            },
            terms: Terms::new(Aggregation::SequenceMean),
        }
    }
}

impl Objective for Gspo {
    fn name(&self) -> &str {
        "gspo"
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
        for sequence in evaluation.scored.sequences().to_vec() {
            let slots = &sequence.slots;
            let num_scored = slots.len() as f64;
            let advantage = one_advantage(&evaluation, &sequence, &inputs.advantages)?;
            let sum: f64 = slots.iter().map(|&t| inputs.log_ratio(t)).sum();
            let log_ratio = sum / num_scored;
            let surrogate = self.clip.surrogate(log_ratio, advantage, None);
            let weight: f64 = slots.iter().map(|&t| inputs.weights[t]).sum();
            evaluation.add_loss(slots[0], weight * surrogate.loss)?;
            for &slot in slots {
                evaluation.add_d_log_prob(slot, weight * surrogate.d_log_ratio / num_scored)?;
            }
            statistics.add(log_ratio, surrogate.clipped);
        }
        statistics.record(&mut evaluation);
        self.terms
            .add(&mut evaluation, &inputs.weights, &inputs.log_probs)?;
        Ok(evaluation.finish())
    }
}

fn one_advantage(
    evaluation: &Evaluation<'_>,
    sequence: &ScoredSequence,
    advantages: &[f64],
) -> Result<f64> {
    let first = advantages[sequence.slots[0]];
    match sequence.slots.iter().find(|&&t| advantages[t] != first) {
        None => Ok(first),
        Some(&other) => {
            let message = "gspo has one advantage a sequence, but the tokens of this one differ";
            Err(evaluation
                .scored
                .data_error(message, ADVANTAGES)
                .with("sequence", sequence.index)
                .with("expected", first)
                .with("found", advantages[other])
                .help("give `advantages` as a per-sequence column"))
        }
    }
}

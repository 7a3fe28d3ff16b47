//! Negative log-likelihood: supervised fine-tuning.

use super::{
    Aggregation, Evaluation, Objective, ObjectiveValue, Requirements, Terms, TokenOutputs,
    scored::Scored,
};
use crate::{
    Result,
    batch::{Batch, BatchTotals},
};

/// `- sum_t w_t log_prob_t` over the scored tokens, with the weights of the aggregation.
#[derive(Debug, Clone, PartialEq)]
pub struct Nll {
    /// Aggregation (`TokenMean` by default), temperature, added terms.
    pub terms: Terms,
}

impl Default for Nll {
    fn default() -> Self {
        Self {
            terms: Terms::new(Aggregation::TokenMean),
        }
    }
}

impl Objective for Nll {
    fn name(&self) -> &str {
        "nll"
    }

    fn requires(&self) -> Requirements {
        self.terms.requires(&[])
    }

    /// True of the likelihood alone: with an added term engines take the general way.
    fn derivative_known(&self) -> bool {
        self.terms.kl.is_none() && self.terms.entropy_coefficient == 0.0
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
        let mut evaluation = Evaluation::new(self.name(), microbatch, outputs);
        let log_probs = evaluation.log_probs()?;
        let weights = self.terms.aggregation.weights(&evaluation.scored, totals)?;
        let slots = evaluation.scored.slots();
        for &slot in &slots {
            evaluation.add_loss(slot, -weights[slot] * log_probs[slot])?;
            evaluation.add_d_log_prob(slot, -weights[slot])?;
        }
        let sum = slots.iter().map(|&slot| log_probs[slot]).sum();
        evaluation
            .metrics()
            .mean("log_prob", sum, slots.len() as f64);
        self.terms.add(&mut evaluation, &weights, &log_probs)?;
        Ok(evaluation.finish())
    }
}

//! Negative log-likelihood: supervised fine-tuning.

use super::{Aggregation, Evaluation, Objective, ObjectiveValue, Requirements, TokenOutputs};
use crate::{
    Result,
    batch::{Batch, BatchTotals},
};

/// `- sum_t w_t log p(token_t)` over the scored tokens, with the weights of the aggregation.
#[derive(Debug, Clone, PartialEq)]
pub struct Nll {
    /// How tokens and sequences are averaged; `TokenMean` by default.
    pub aggregation: Aggregation,
    /// Divides the logits.
    pub temperature: f64,
}

impl Default for Nll {
    fn default() -> Self {
        Self {
            aggregation: Aggregation::TokenMean,
            temperature: 1.0,
        }
    }
}

impl Objective for Nll {
    fn name(&self) -> &str {
        "nll"
    }

    fn requires(&self) -> Requirements {
        Requirements {
            temperature: self.temperature,
            ..Requirements::default()
        }
    }

    fn derivative_known(&self) -> bool {
        true
    }

    fn evaluate(
        &self,
        microbatch: &Batch,
        outputs: &TokenOutputs,
        totals: &BatchTotals,
    ) -> Result<ObjectiveValue> {
        let mut evaluation = Evaluation::new(self.name(), microbatch, outputs);
        let log_probs = evaluation.log_probs()?;
        let (mut sum, mut count) = (0.0, 0.0);
        for sequence in evaluation.sequences() {
            let weight = self
                .aggregation
                .token_weight(sequence.slots.len(), totals)?;
            for slot in sequence.slots {
                evaluation.add(slot, -weight * log_probs[slot], -weight)?;
                sum += log_probs[slot];
                count += 1.0;
            }
        }
        evaluation.metrics().mean("log_prob", sum, count);
        Ok(evaluation.finish())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::BatchBuilder;

    fn evaluate(nll: &Nll, lengths_and_masks: &[&[bool]], log_probs: &[f64]) -> ObjectiveValue {
        let mut builder = BatchBuilder::new();
        for mask in lengths_and_masks {
            builder.push(&vec![1; mask.len()], Some(mask)).unwrap();
        }
        let batch = builder.build().unwrap();
        let outputs = TokenOutputs {
            log_probs: log_probs.to_vec(),
            ..TokenOutputs::default()
        };
        nll.evaluate(&batch, &outputs, &BatchTotals::count(&batch))
            .unwrap()
    }

    #[test]
    fn both_means_by_hand() {
        let masks: [&[bool]; 2] = [&[false, true, true, true], &[true, true]];
        let log_probs = [0.0, -1.0, -2.0, -3.0, 0.0, -8.0];
        let token = evaluate(&Nll::default(), &masks, &log_probs);
        assert_eq!(token.loss, 14.0 / 4.0);
        assert_eq!(token.d_log_probs, [0.0, -0.25, -0.25, -0.25, 0.0, -0.25]);
        let sequence = Nll {
            aggregation: Aggregation::SequenceMean,
            ..Nll::default()
        };
        let sequence = evaluate(&sequence, &masks, &log_probs);
        assert!((sequence.loss - (6.0 / 3.0 + 8.0) / 2.0).abs() < 1e-12);
        assert_eq!(sequence.d_log_probs[5], -0.5);
        assert_eq!(sequence.metrics.value("log_prob"), Some(-3.5));
    }

    #[test]
    fn a_masked_sample_adds_nothing_to_the_divisor() {
        let masks: [&[bool]; 2] = [&[false, true, true, true, true], &[false; 3]];
        let log_probs = [
            0.0,
            -1.0,
            -1.0,
            -1.0,
            -1.0,
            0.0,
            f64::NAN,
            f64::NEG_INFINITY,
        ];
        let value = evaluate(&Nll::default(), &masks, &log_probs);
        assert_eq!(value.loss, 1.0);
        assert_eq!(value.d_log_probs[1], -0.25);
    }

    #[test]
    fn nothing_scored_is_finite() {
        let value = evaluate(&Nll::default(), &[&[false; 3]], &[0.0; 3]);
        assert_eq!(
            (value.loss, value.metrics.value("log_prob")),
            (0.0, Some(0.0))
        );
        assert_eq!(value.d_log_probs, [0.0; 3]);
    }
}

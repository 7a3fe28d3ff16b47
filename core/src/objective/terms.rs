//! What the objectives share: aggregation, temperature, and the terms that can be added to any of them.

use super::{Aggregation, Evaluation, Requirements};
use crate::{Result, config::KlEstimator};

/// Settings that compose with any policy loss.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Terms {
    /// How tokens and sequences are averaged.
    pub aggregation: Aggregation,
    /// Divides the logits before log-prob and entropy alike, in training and scoring.
    pub temperature: f64,
    /// KL divergence to the reference policy, added to the loss.
    pub kl: Option<KlTerm>,
    /// Weight of the entropy, subtracted from the loss.
    pub entropy_coefficient: f64,
}

impl Terms {
    /// No added terms, temperature 1.
    pub fn new(aggregation: Aggregation) -> Self {
        Self {
            aggregation,
            temperature: 1.0,
            kl: None,
            entropy_coefficient: 0.0,
        }
    }

    /// What these terms need beside the `columns` of the objective itself.
    pub(super) fn requires(&self, columns: &[&str]) -> Requirements {
        let reference = self.kl.map(|_| super::REFERENCE_LOG_PROBS);
        Requirements {
            temperature: self.temperature,
            entropy: self.entropy_coefficient != 0.0,
            columns: columns
                .iter()
                .copied()
                .chain(reference)
                .map(str::to_owned)
                .collect(),
            ..Requirements::default()
        }
    }

    /// Adds the terms' loss and derivatives; `weights` and `log_probs` are `[T]`.
    pub(super) fn add(
        &self,
        evaluation: &mut Evaluation<'_>,
        weights: &[f64],
        log_probs: &[f64],
    ) -> Result<()> {
        if let Some(kl) = self.kl {
            kl.add(evaluation, weights, log_probs)?;
        }
        if self.entropy_coefficient != 0.0 {
            self.add_entropy(evaluation, weights)?;
        }
        Ok(())
    }

    fn add_entropy(&self, evaluation: &mut Evaluation<'_>, weights: &[f64]) -> Result<()> {
        let entropy = evaluation.entropy()?;
        let slots = evaluation.scored.slots();
        for &slot in &slots {
            evaluation.add_loss(
                slot,
                -self.entropy_coefficient * weights[slot] * entropy[slot],
            )?;
        }
        // Weights are 0 in masked slots, and `0.0 *` of a finite coefficient is 0.
        evaluation.set_d_entropy(
            weights
                .iter()
                .map(|w| -self.entropy_coefficient * w)
                .collect(),
        );
        let sum = slots.iter().map(|&slot| entropy[slot]).sum();
        evaluation
            .metrics()
            .mean("entropy", sum, slots.len() as f64);
        Ok(())
    }
}

/// An estimate of `KL(policy || reference)` from tokens that the policy drew (Schulman, "Approximating KL
/// divergence", 2020), with `d = log_prob - reference_log_prob`:
///
/// | | term | its derivative by `log_prob` | mean of the derivative's gradient over tokens of the policy |
/// |---|---|---|---|
/// | k1 | `d` | `1` | 0: no pull at all, in expectation |
/// | k2 | `d^2 / 2` | `d` | the gradient of `KL(policy || reference)` |
/// | k3 | `exp(-d) - 1 + d` | `1 - exp(-d)` | the gradient of `KL(reference || policy)` |
///
/// The derivative is the plain one of the term, the tokens being taken as given: k1 and k3 estimate the value
/// of the divergence without bias, but only k2 its gradient. k3 (GRPO's, Shao et al. 2024, equation 4) is
/// never negative and pulls towards the reference all the same.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KlTerm {
    /// Its weight in the loss.
    pub coefficient: f64,
    /// Which estimate.
    pub estimator: KlEstimator,
}

impl KlTerm {
    fn add(
        &self,
        evaluation: &mut Evaluation<'_>,
        weights: &[f64],
        log_probs: &[f64],
    ) -> Result<()> {
        let reference = evaluation.scored.column(super::REFERENCE_LOG_PROBS)?;
        let slots = evaluation.scored.slots();
        let mut sum = 0.0;
        for &slot in &slots {
            let (term, derivative) = estimate(self.estimator, log_probs[slot] - reference[slot]);
            let weight = self.coefficient * weights[slot];
            evaluation.add_loss(slot, weight * term)?;
            evaluation.add_d_log_prob(slot, weight * derivative)?;
            sum += term;
        }
        evaluation.metrics().mean("kl", sum, slots.len() as f64);
        Ok(())
    }
}

/// The estimate and its derivative at a log ratio.
fn estimate(estimator: KlEstimator, d: f64) -> (f64, f64) {
    match estimator {
        KlEstimator::K1 => (d, 1.0),
        KlEstimator::K2 => (0.5 * d * d, d),
        // exp_m1 keeps the digits that `exp(-d) - 1` loses near 0.
        KlEstimator::K3 => ((-d).exp_m1() + d, -(-d).exp_m1()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimators_by_hand() {
        let d = 2.0_f64.ln();
        assert_eq!(estimate(KlEstimator::K1, d), (d, 1.0));
        assert_eq!(estimate(KlEstimator::K2, d), (d * d / 2.0, d));
        let (term, derivative) = estimate(KlEstimator::K3, d);
        assert!((term - (0.5 - 1.0 + d)).abs() < 1e-15);
        assert!((derivative - 0.5).abs() < 1e-15);
        assert_eq!(estimate(KlEstimator::K3, 0.0), (0.0, 0.0));
    }
}

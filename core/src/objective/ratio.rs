//! Importance ratios between the policy and the one that made the rollouts, and their clipping.

use super::{ADVANTAGES, Evaluation, OLD_LOG_PROBS, Terms};
use crate::{Result, batch::BatchTotals};

/// How far a ratio may leave 1: `[1 - low, 1 + high]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Clip {
    /// Below 1.
    pub low: f64,
    /// Above 1.
    pub high: f64,
}

impl Clip {
    /// The clipped ratio.
    pub(super) fn apply(self, ratio: f64) -> f64 {
        ratio.clamp(1.0 - self.low, 1.0 + self.high)
    }

    /// `-min(ratio * advantage, clip(ratio) * advantage)` and its derivative by the log of the ratio
    /// (Schulman et al. 2017, equation 7). With `dual_clip = c`, the loss of a negative advantage is at most
    /// `-c * advantage` (Ye et al. 2020, equation 5).
    pub(super) fn surrogate(
        self,
        log_ratio: f64,
        advantage: f64,
        dual_clip: Option<f64>,
    ) -> Surrogate {
        let ratio = log_ratio.exp();
        // Each branch that is bounded is left before `ratio`, which may be infinite, is multiplied.
        let bound = if advantage >= 0.0 {
            Some(1.0 + self.high).filter(|&high| ratio > high)
        } else {
            Some(1.0 - self.low)
                .filter(|&low| ratio < low)
                .or(dual_clip.filter(|&c| ratio > c))
        };
        match bound {
            Some(bound) => Surrogate {
                loss: -bound * advantage,
                d_log_ratio: 0.0,
                clipped: true,
            },
            None => Surrogate {
                loss: -ratio * advantage,
                d_log_ratio: -ratio * advantage,
                clipped: false,
            },
        }
    }
}

/// The loss of one ratio.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Surrogate {
    pub(super) loss: f64,
    pub(super) d_log_ratio: f64,
    /// Whether the clip took the gradient away.
    pub(super) clipped: bool,
}

/// What the objectives with importance ratios read of a micro-batch, by token.
#[derive(Debug)]
pub(super) struct RatioInputs {
    pub(super) log_probs: Vec<f64>,
    pub(super) old_log_probs: Vec<f64>,
    pub(super) advantages: Vec<f64>,
    /// Of the aggregation.
    pub(super) weights: Vec<f64>,
}

impl RatioInputs {
    pub(super) fn read(
        evaluation: &Evaluation<'_>,
        terms: &Terms,
        totals: &BatchTotals,
    ) -> Result<Self> {
        Ok(Self {
            log_probs: evaluation.log_probs()?,
            old_log_probs: evaluation.scored.column(OLD_LOG_PROBS)?,
            advantages: evaluation.scored.column(ADVANTAGES)?,
            weights: terms.aggregation.weights(&evaluation.scored, totals)?,
        })
    }

    pub(super) fn log_ratio(&self, slot: usize) -> f64 {
        self.log_probs[slot] - self.old_log_probs[slot]
    }
}

/// What the ratios of a micro-batch looked like.
#[derive(Debug, Default)]
pub(super) struct RatioStatistics {
    count: f64,
    clipped: f64,
    sum: f64,
    max: f64,
    approx_kl: f64,
}

impl RatioStatistics {
    pub(super) fn add(&mut self, log_ratio: f64, clipped: bool) {
        let ratio = log_ratio.exp();
        self.count += 1.0;
        self.clipped += f64::from(u8::from(clipped));
        self.sum += ratio;
        self.max = self.max.max(ratio);
        self.approx_kl += log_ratio.exp_m1() - log_ratio;
    }

    /// `ratio_mean`, `ratio_max`, `clip_fraction`, and `approx_kl`: `KL(old || policy)` by the k3 estimator.
    pub(super) fn record(&self, evaluation: &mut Evaluation<'_>) {
        let metrics = evaluation.metrics();
        metrics.mean("ratio_mean", self.sum, self.count);
        if self.count > 0.0 {
            metrics.max("ratio_max", self.max);
        }
        metrics.mean("clip_fraction", self.clipped, self.count);
        metrics.mean("approx_kl", self.approx_kl, self.count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loss(ratio: f64, advantage: f64, dual_clip: Option<f64>) -> (f64, f64) {
        let clip = Clip {
            low: 0.2,
            high: 0.3,
        };
        let surrogate = clip.surrogate(ratio.ln(), advantage, dual_clip);
        (surrogate.loss, surrogate.d_log_ratio)
    }

    fn assert_close(found: (f64, f64), expected: (f64, f64)) {
        let gap = (found.0 - expected.0)
            .abs()
            .max((found.1 - expected.1).abs());
        assert!(gap <= 1e-12, "{found:?} for {expected:?}");
    }

    #[test]
    fn every_branch_by_hand() {
        assert_close(loss(1.1, 2.0, None), (-2.2, -2.2));
        assert_close(loss(1.5, 2.0, None), (-2.6, 0.0));
        assert_close(loss(0.5, 2.0, None), (-1.0, -1.0));
        assert_close(loss(0.5, -2.0, None), (1.6, 0.0));
        assert_close(loss(5.0, -2.0, None), (10.0, 10.0));
        assert_close(loss(5.0, -2.0, Some(3.0)), (6.0, 0.0));
    }

    #[test]
    fn an_infinite_ratio_is_bounded_where_the_clip_bounds_it() {
        let clip = Clip {
            low: 0.2,
            high: 0.2,
        };
        assert_eq!(clip.surrogate(1e4, 1.0, None).loss, -1.2);
        assert_eq!(clip.surrogate(1e4, -1.0, Some(3.0)).loss, 3.0);
        assert_eq!(clip.surrogate(1e4, -1.0, None).loss, f64::INFINITY);
    }
}

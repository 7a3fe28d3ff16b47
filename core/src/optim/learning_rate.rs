//! The learning rate: a pure function of the step, so that a resumed run needs nothing but its step count.

use std::f64::consts::PI;

use enum_dispatch::enum_dispatch;

use crate::config::{JobConfig, OptimizerConfig, ScheduleConfig, ScheduleKind};

/// Warmup, then one of the shapes.
///
/// Step n counts from 0. Warmup over w steps is `(n + 1) / w` of the peak, so that its first step already
/// moves and its last one (step w - 1) is at the peak; without warmup step 0 is at the peak. A decay ends at
/// `min_ratio` in the last step. Steps beyond the last keep its rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LearningRate {
    peak: f64,
    warmup_steps: u64,
    shape: Shape,
}

impl LearningRate {
    /// The schedule of a job.
    pub fn new(job: &JobConfig) -> Self {
        Self::from_parts(&job.optimizer, &job.schedule, job.steps)
    }

    /// The schedule over `steps` steps in all.
    pub fn from_parts(optimizer: &OptimizerConfig, schedule: &ScheduleConfig, steps: u64) -> Self {
        let last = steps.saturating_sub(1);
        let peak = schedule.warmup_steps.saturating_sub(1);
        let decay = Decay {
            from: peak,
            to: last,
            min_ratio: schedule.min_ratio,
        };
        let shape = match schedule.kind {
            ScheduleKind::Constant => Constant {}.into(),
            ScheduleKind::Linear => Linear(decay).into(),
            ScheduleKind::Cosine => Cosine(decay).into(),
            ScheduleKind::WarmupStableDecay => WarmupStableDecay(Decay {
                from: last.saturating_sub(schedule.decay_steps).max(peak),
                ..decay
            })
            .into(),
        };
        Self {
            peak: optimizer.learning_rate,
            warmup_steps: schedule.warmup_steps,
            shape,
        }
    }

    /// The learning rate of optimizer step `step`, counted from 0.
    pub fn at(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            self.peak * (step + 1) as f64 / self.warmup_steps as f64
        } else {
            self.peak * self.shape.ratio(step)
        }
    }
}

/// What comes after warmup, as a part of the peak.
#[enum_dispatch]
trait AfterWarmup {
    fn ratio(&self, step: u64) -> f64;
}

#[enum_dispatch(AfterWarmup)]
#[derive(Debug, Clone, Copy, PartialEq)]
enum Shape {
    Constant,
    Linear,
    Cosine,
    WarmupStableDecay,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Constant {}

impl AfterWarmup for Constant {
    fn ratio(&self, _step: u64) -> f64 {
        1.0
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Linear(Decay);

impl AfterWarmup for Linear {
    fn ratio(&self, step: u64) -> f64 {
        self.0.between(1.0 - self.0.progress(step))
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Cosine(Decay);

impl AfterWarmup for Cosine {
    fn ratio(&self, step: u64) -> f64 {
        self.0
            .between(0.5 * (1.0 + (PI * self.0.progress(step)).cos()))
    }
}

/// A plateau, then a line down (Hu et al. 2024, MiniCPM).
#[derive(Debug, Clone, Copy, PartialEq)]
struct WarmupStableDecay(Decay);

impl AfterWarmup for WarmupStableDecay {
    fn ratio(&self, step: u64) -> f64 {
        Linear(self.0).ratio(step)
    }
}

/// From the peak at step `from` to `min_ratio` of it at step `to`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Decay {
    from: u64,
    to: u64,
    min_ratio: f64,
}

impl Decay {
    /// 0 up to `from`, 1 from `to` on.
    fn progress(&self, step: u64) -> f64 {
        if step <= self.from {
            0.0
        } else if step >= self.to {
            1.0
        } else {
            (step - self.from) as f64 / (self.to - self.from) as f64
        }
    }

    /// The ratio at `height` between `min_ratio` (0) and the peak (1).
    fn between(&self, height: f64) -> f64 {
        self.min_ratio + (1.0 - self.min_ratio) * height
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(kind: ScheduleKind, warmup: u64, decay: u64, steps: u64) -> Vec<f64> {
        let optimizer = OptimizerConfig {
            learning_rate: 8.0,
            ..OptimizerConfig::default()
        };
        let schedule = ScheduleConfig {
            kind,
            warmup_steps: warmup,
            min_ratio: 0.25,
            decay_steps: decay,
        };
        let rate = LearningRate::from_parts(&optimizer, &schedule, steps);
        (0..steps + 1).map(|n| rate.at(n)).collect()
    }

    fn assert_close(found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        for (f, e) in found.iter().zip(expected) {
            assert!((f - e).abs() <= 1e-12, "{found:?} for {expected:?}");
        }
    }

    #[test]
    fn every_shape_by_hand() {
        use ScheduleKind::{Constant, Cosine, Linear, WarmupStableDecay};
        // Peak 8, end 2; the last value is one step beyond the end.
        assert_close(&rates(Constant, 4, 0, 5), &[2.0, 4.0, 6.0, 8.0, 8.0, 8.0]);
        assert_close(&rates(Linear, 2, 0, 5), &[4.0, 8.0, 6.0, 4.0, 2.0, 2.0]);
        assert_close(&rates(Linear, 0, 0, 4), &[8.0, 6.0, 4.0, 2.0, 2.0]);
        assert_close(&rates(Cosine, 2, 0, 4), &[4.0, 8.0, 5.0, 2.0, 2.0]);
        assert_close(
            &rates(WarmupStableDecay, 1, 3, 6),
            &[8.0, 8.0, 8.0, 6.0, 4.0, 2.0, 2.0],
        );
    }

    #[test]
    fn odd_lengths_stay_finite_and_within_the_peak() {
        use ScheduleKind::{Constant, Cosine, Linear, WarmupStableDecay};
        for kind in [Constant, Linear, Cosine, WarmupStableDecay] {
            for (warmup, decay, steps) in [(0, 0, 1), (1, 1, 1), (9, 2, 4), (0, 9, 4), (3, 0, 3)] {
                for rate in rates(kind, warmup, decay, steps) {
                    assert!(
                        rate > 0.0 && rate <= 8.0,
                        "{kind:?} {warmup} {decay} {steps}: {rate}"
                    );
                }
            }
        }
    }
}

//! How fast a step was: tokens, FLOPs, and the part of the machine's peak they make (MFU).

use std::time::{Duration, Instant};

use super::Metrics;
use crate::model::ModelSpec;

/// The work of one step: what the model needs, whatever an engine computes twice or pads.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepWork {
    /// Tokens of the global batch, scored or not.
    pub tokens: u64,
    /// FLOPs of forward and backward over them, see [`ModelSpec::train_flops`].
    pub flops: f64,
}

impl StepWork {
    /// The work of a global batch with sequences of these lengths.
    pub fn of(model: &ModelSpec, lengths: &[usize]) -> Self {
        Self {
            tokens: lengths.iter().map(|&n| n as u64).sum(),
            flops: model.train_flops(lengths),
        }
    }

    /// Records `tokens`, `step_seconds`, `tokens_per_second`, `flops_per_second` and, against a peak in FLOP/s
    /// over all ranks, `mfu` (Chowdhery et al. 2022, appendix B: recomputation does not count as work).
    pub fn record(&self, metrics: &mut Metrics, elapsed: Duration, peak_flops: Option<f64>) {
        let seconds = elapsed.as_secs_f64();
        metrics.sum("tokens", self.tokens as f64);
        metrics.max("step_seconds", seconds);
        if seconds > 0.0 {
            metrics.mean("tokens_per_second", self.tokens as f64, seconds);
            metrics.mean("flops_per_second", self.flops, seconds);
            if let Some(peak) = peak_flops.filter(|&peak| peak > 0.0) {
                metrics.mean("mfu", self.flops, seconds * peak);
            }
        }
    }
}

/// The best rate in units a second (FLOP, bytes) of calls that each do `units_per_call`: repeats `call` for at
/// least `least` and three times. A peak to lay an engine's rate against is a matrix product of a size that
/// fills the machine, on as many threads as the ranks have together.
pub fn measure_rate(units_per_call: f64, least: Duration, mut call: impl FnMut()) -> f64 {
    let start = Instant::now();
    let mut best = f64::INFINITY;
    let mut calls = 0;
    while calls < 3 || start.elapsed() < least {
        let call_start = Instant::now();
        call();
        best = best.min(call_start.elapsed().as_secs_f64());
        calls += 1;
    }
    // A clock that did not move cannot give a rate.
    units_per_call / best.max(1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_by_hand() {
        let work = StepWork {
            tokens: 100,
            flops: 3e9,
        };
        let mut metrics = Metrics::default();
        work.record(&mut metrics, Duration::from_secs(2), Some(6e9));
        work.record(&mut metrics, Duration::from_secs(4), Some(6e9));
        // Two steps: 200 tokens and 6e9 FLOPs in 6 seconds.
        let close = |name: &str, expected: f64| {
            let found = metrics.value(name).unwrap();
            assert!(
                (found - expected).abs() <= 1e-9 * expected,
                "{name}: {found}"
            );
        };
        close("tokens", 200.0);
        close("tokens_per_second", 200.0 / 6.0);
        close("flops_per_second", 1e9);
        close("mfu", 1.0 / 6.0);
        close("step_seconds", 4.0);
    }

    #[test]
    fn no_peak_no_mfu_and_no_time_no_rate() {
        let mut metrics = Metrics::default();
        StepWork::default().record(&mut metrics, Duration::ZERO, Some(1.0));
        assert_eq!(metrics.value("tokens_per_second"), None);
        StepWork::default().record(&mut metrics, Duration::from_secs(1), None);
        assert_eq!(metrics.value("mfu"), None);
    }

    #[test]
    fn the_best_call_counts() {
        let mut calls = 0;
        let rate = measure_rate(1.0, Duration::ZERO, || {
            calls += 1;
            std::thread::sleep(Duration::from_millis(if calls == 2 { 2 } else { 40 }));
        });
        assert_eq!(calls, 3);
        assert!(rate > 1.0 / 0.040 && rate <= 1.0 / 0.002, "{rate}");
    }
}

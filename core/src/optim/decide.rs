//! The one point at which a step commits.

use super::{LearningRate, clip_factor};
use crate::{
    Error, ErrorKind, Result,
    communicator::Communicator,
    engine::{OptimReport, StepOptions},
};

/// What every rank does with a step, the same on each.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    /// The step as it is reported once it is done.
    pub report: OptimReport,
    /// What the accumulated gradient is multiplied by: clip factor over divisor. `None` where the step is
    /// skipped.
    pub gradient_scale: Option<f64>,
}

/// Decides what becomes of step `step` (from 0): the commit point. Collective over the whole `world`; before
/// it nothing that is saved may have changed, and after it every rank updates or every rank skips.
///
/// `own_squares` is the sum of the squares of the accumulated gradient's elements that this rank answers for,
/// each element of the model once over all ranks. A rank that answers for none but whose gradient is not
/// finite may give a NaN.
///
/// # Errors
/// That of `own_squares` of any rank, on every rank; the communicator's.
pub fn decide(
    world: &dyn Communicator,
    own_squares: Result<f64>,
    step: u64,
    schedule: &LearningRate,
    max_grad_norm: Option<f64>,
    options: &StepOptions,
) -> Result<Decision> {
    let own = world.agree("optim_step", own_squares)?;
    let mut sums = [own, f64::from(u8::from(!own.is_finite()))];
    world.sum_f64(&mut sums)?;
    let divisor = options.gradient_divisor.unwrap_or(1.0);
    let grad_norm = sums[0].sqrt() / divisor;
    let skipped = sums[1] > 0.0 || !grad_norm.is_finite();
    let clip_factor = match skipped {
        true => 1.0,
        false => clip_factor(grad_norm, max_grad_norm),
    };
    Ok(Decision {
        report: OptimReport {
            step: step + u64::from(!skipped),
            grad_norm,
            clip_factor,
            skipped,
            learning_rate: options.learning_rate.unwrap_or_else(|| schedule.at(step)),
        },
        gradient_scale: (!skipped).then_some(clip_factor / divisor),
    })
}

/// Whatever fails after [`decide`] leaves ranks with different weights: it is `Poisoned`.
///
/// # Errors
/// That of `outcome`, as the cause.
pub fn committed<T>(step: u64, outcome: Result<T>) -> Result<T> {
    outcome.map_err(|cause| {
        Error::new(
            ErrorKind::Poisoned,
            "optim_step",
            "the step failed after its commit point: ranks may hold different weights",
        )
        .with("step", step)
        .help("end the job and resume from its last checkpoint")
        .caused_by(cause)
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        config::{OptimizerConfig, ScheduleConfig},
        launch::run_ranks,
    };

    fn decided(squares: [f64; 2], options: &StepOptions) -> Vec<Decision> {
        let optimizer = OptimizerConfig {
            learning_rate: 0.5,
            ..OptimizerConfig::default()
        };
        let schedule = LearningRate::from_parts(&optimizer, &ScheduleConfig::default(), 10);
        run_ranks(2, Duration::from_secs(20), |world| {
            let own = Ok(squares[world.rank()]);
            decide(&*world, own, 3, &schedule, Some(1.0), options)
        })
        .unwrap()
    }

    #[test]
    fn the_norm_is_of_all_ranks_and_clips_what_the_divisor_left() {
        let options = StepOptions {
            gradient_divisor: Some(2.0),
            learning_rate: Some(0.25),
        };
        for decision in decided([64.0, 36.0], &options) {
            let report = &decision.report;
            assert_eq!((report.step, report.skipped), (4, false));
            assert_eq!((report.grad_norm, report.learning_rate), (5.0, 0.25));
            assert!((report.clip_factor - 0.2).abs() < 1e-6);
            assert_eq!(decision.gradient_scale, Some(report.clip_factor / 2.0));
        }
    }

    #[test]
    fn one_rank_that_is_not_finite_skips_on_all() {
        for bad in [f64::INFINITY, f64::NAN] {
            for decision in decided([1.0, bad], &StepOptions::default()) {
                let report = &decision.report;
                assert_eq!((report.step, report.skipped), (3, true));
                assert_eq!((report.clip_factor, decision.gradient_scale), (1.0, None));
                assert!(!report.grad_norm.is_finite());
            }
        }
    }

    #[test]
    fn a_rank_without_a_norm_fails_all_and_a_failure_after_the_decision_poisons() {
        let schedule =
            LearningRate::from_parts(&OptimizerConfig::default(), &ScheduleConfig::default(), 10);
        let kinds = run_ranks(2, Duration::from_secs(20), |world| {
            let own = match world.rank() {
                0 => Ok(1.0),
                _ => Err(Error::new(ErrorKind::Device, "grad_norm", "out of memory")),
            };
            let options = StepOptions::default();
            let outcome = decide(&*world, own, 0, &schedule, None, &options).map(drop);
            let poisoned = committed(1, Err::<(), _>(Error::new(ErrorKind::Device, "x", "y")));
            Ok([outcome.unwrap_err(), poisoned.unwrap_err()].map(|e| e.kind()))
        });
        let expected = [ErrorKind::Device, ErrorKind::Poisoned];
        assert_eq!(kinds.unwrap(), [expected; 2]);
    }
}

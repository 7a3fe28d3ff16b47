//! Data-parallel ranks against one rank, and what happens when one of them goes wrong.

mod common;

use common::{assert_close, batch, engine, job, model, on_ranks, share, train, weights};
use drivetrain_core::{
    Error, ErrorKind, Result,
    batch::{Batch, BatchTotals},
    engine::{StepOptions, Weights},
    model::Family,
    objective::{Nll, Objective, ObjectiveValue, TokenOutputs},
    plan::MicrobatchLimit,
    weights::MemoryWeights,
};

#[test]
fn ranks_and_cuts_do_not_change_the_training() {
    for family in [Family::Llama, Family::Qwen2] {
        let objective = Nll::default();
        let one = train(&job(model(family), 1), MicrobatchLimit::All, &objective, 5);
        for ranks in [1, 2, 3, 4] {
            for limit in [
                MicrobatchLimit::Sequences(1),
                MicrobatchLimit::Tokens(9),
                MicrobatchLimit::All,
            ] {
                let run = train(&job(model(family), ranks), limit, &objective, 5);
                let what = format!("{family:?}, {ranks} ranks, {limit:?}");
                for step in 0..5 {
                    let gap = (run.losses[step] - one.losses[step]).abs();
                    assert!(
                        gap <= 2e-6 * one.losses[step],
                        "{what}: loss of step {step} by {gap}"
                    );
                    let (norm, want) = (run.reports[step].grad_norm, one.reports[step].grad_norm);
                    assert!(
                        (norm - want).abs() <= 1e-5 * want,
                        "{what}: norm {norm}, not {want}"
                    );
                }
                assert_close(&what, &run.gradients, &one.gradients, 2e-6);
                assert_close(&what, &run.weights, &one.weights, 1e-4);
            }
        }
    }
}

#[test]
fn the_same_layout_gives_the_same_bits() {
    let job = job(model(Family::Qwen3), 3);
    let run = || train(&job, MicrobatchLimit::Sequences(2), &Nll::default(), 3);
    assert_eq!(run().weights, run().weights);
}

/// NLL, but on the rank where it is told to, with an infinite derivative or an error.
#[derive(Debug)]
struct Faulty {
    inner: Nll,
    fails: bool,
    infinite: bool,
}

impl Objective for Faulty {
    fn name(&self) -> &str {
        "faulty"
    }

    fn evaluate(
        &self,
        microbatch: &Batch,
        outputs: &TokenOutputs,
        totals: &BatchTotals,
    ) -> Result<ObjectiveValue> {
        if self.fails {
            return Err(Error::new(ErrorKind::NonFinite, "evaluate", "made to fail"));
        }
        let mut value = self.inner.evaluate(microbatch, outputs, totals)?;
        if self.infinite {
            value
                .d_log_probs
                .iter_mut()
                .filter(|d| **d != 0.0)
                .for_each(|d| *d = f64::INFINITY);
        }
        Ok(value)
    }
}

/// A bad first step on rank 1 of 2, then a clean one; the weights and both outcomes.
fn after_a_bad_step(fails: bool, infinite: bool) -> Vec<(Option<ErrorKind>, bool, MemoryWeights)> {
    let job = job(model(Family::Llama), 2);
    let start = weights(&job.model);
    let body = |world: std::sync::Arc<dyn drivetrain_core::communicator::Communicator>| {
        let rank = world.rank();
        let (share, totals) = share(&batch(), 2, rank, MicrobatchLimit::Sequences(1));
        let mut engine = engine(&job, world, &start)?;
        let bad = Faulty {
            inner: Nll::default(),
            fails: fails && rank == 1,
            infinite: infinite && rank == 1,
        };
        let outcome = engine
            .forward_backward(&share, &bad, &totals)
            .err()
            .map(|e| e.kind());
        let mut skipped = false;
        if outcome.is_none() {
            skipped = engine.optim_step(&StepOptions::default())?.skipped;
        }
        assert_eq!(engine.step(), 0);
        engine.forward_backward(&share, &Nll::default(), &totals)?;
        assert!(!engine.optim_step(&StepOptions::default())?.skipped);
        let mut weights = MemoryWeights::new();
        engine.export_weights(&Weights::Policy, &mut weights)?;
        Ok((outcome, skipped, weights))
    };
    drivetrain_core::launch::run_ranks(2, std::time::Duration::from_secs(20), body).unwrap()
}

#[test]
fn an_infinite_gradient_on_one_rank_skips_on_all_and_leaves_no_trace() {
    let clean = train(
        &job(model(Family::Llama), 2),
        MicrobatchLimit::Sequences(1),
        &Nll::default(),
        1,
    );
    for (error, skipped, weights) in after_a_bad_step(false, true) {
        assert_eq!((error, skipped), (None, true));
        assert_eq!(weights, clean.weights);
    }
}

#[test]
fn an_objective_that_fails_on_one_rank_fails_on_all_at_once_and_leaves_no_trace() {
    let clean = train(
        &job(model(Family::Llama), 2),
        MicrobatchLimit::Sequences(1),
        &Nll::default(),
        1,
    );
    for (error, _, weights) in after_a_bad_step(true, false) {
        assert_eq!(error, Some(ErrorKind::NonFinite));
        assert_eq!(weights, clean.weights);
    }
}

#[test]
fn a_norm_is_clipped_as_a_whole() {
    let mut job = job(model(Family::Llama), 2);
    job.config.optimizer.max_grad_norm = Some(0.01);
    let run = train(&job, MicrobatchLimit::All, &Nll::default(), 1);
    let report = &run.reports[0];
    assert!(report.grad_norm > 0.01);
    assert!((report.grad_norm * report.clip_factor - 0.01).abs() <= 1e-6);
}

#[test]
fn a_deferred_divisor_gives_the_same_step() {
    let job = job(model(Family::Llama), 2);
    let start = weights(&job.model);
    let expected = train(&job, MicrobatchLimit::All, &Nll::default(), 1);
    let weights = on_ranks(2, |world| {
        let (share, totals) = share(&batch(), 2, world.rank(), MicrobatchLimit::All);
        let deferred = BatchTotals {
            tokens: 1,
            ..totals.clone()
        };
        let mut engine = engine(&job, world, &start)?;
        // Streamed in two calls, so that the second reduction adds to the first.
        for sequence in 0..2 {
            let part = match sequence < share.num_sequences() {
                true if sequence == 1 => {
                    share.select(&(1..share.num_sequences()).collect::<Vec<_>>())
                }
                true => share.select(&[0]),
                false => share.select(&[]),
            };
            engine.forward_backward(&part, &Nll::default(), &deferred)?;
        }
        engine.optim_step(&StepOptions {
            gradient_divisor: Some(totals.tokens as f64),
            ..StepOptions::default()
        })?;
        let mut weights = MemoryWeights::new();
        engine.export_weights(&Weights::Policy, &mut weights)?;
        Ok(weights)
    });
    assert_close("deferred", &weights, &expected.weights, 1e-5);
}

#[test]
fn gradients_of_a_dropped_step_do_not_come_back() {
    for ranks in [1, 2] {
        let job = job(model(Family::Qwen2), ranks);
        let start = weights(&job.model);
        let clean = train(&job, MicrobatchLimit::Sequences(1), &Nll::default(), 1);
        let weights = on_ranks(ranks, |world| {
            let (share, totals) =
                share(&batch(), ranks, world.rank(), MicrobatchLimit::Sequences(1));
            let mut engine = engine(&job, world, &start)?;
            engine.forward_backward(&share, &Nll::default(), &totals)?;
            engine.abort()?;
            let unopened = engine.optim_step(&StepOptions::default()).unwrap_err();
            assert_eq!(unopened.kind(), ErrorKind::CallOrder);
            engine.forward_backward(&share, &Nll::default(), &totals)?;
            engine.optim_step(&StepOptions::default())?;
            let mut weights = MemoryWeights::new();
            engine.export_weights(&Weights::Policy, &mut weights)?;
            Ok(weights)
        });
        assert_eq!(weights, clean.weights);
    }
}

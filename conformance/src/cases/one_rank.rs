//! A fault of one rank: every rank gets an error of its kind that names it, and nothing has changed.

use std::ops::Range;

use drivetrain_core::{
    DType, Error, ErrorKind, Result,
    batch::{BatchBuilder, BatchTotals},
    engine::{Engine, ScoreRequest, Weights},
    objective::Nll,
    plan::MicrobatchLimit,
    weights::{MemoryWeights, WeightSource},
};

use super::engine_state::{Fixture, equal, not_refused};
use crate::{
    fixture::{batches, weights},
    objective::Failing,
    suite::{Findings, Rank},
};

pub(super) fn failed_objective(fixture: &Fixture, findings: &mut Findings) -> Result<()> {
    for kind in [ErrorKind::NonFinite, ErrorKind::Data] {
        // Model-parallel peers look at the same share, all of them or one for all.
        let faulty = |rank: &Rank| rank.data_index + 1 == rank.plan.mesh.data_size();
        nothing_changes(fixture, findings, kind, faulty, |rank, n, last| {
            fixture.accumulate(rank, n + 40)?;
            let batch = rank.whole(&batches::plain(fixture.model.vocab_size, n)?)?;
            let totals = BatchTotals::count(&batch);
            let nll = Nll::default();
            let failing = Failing(&nll, last.then_some(kind));
            let outcome = rank.engine.forward_backward(&batch, &failing, &totals);
            Ok(outcome.err())
        })?;
    }
    Ok(())
}

pub(super) fn failed_import(fixture: &Fixture, findings: &mut Findings) -> Result<()> {
    let other = weights(&fixture.model, fixture.subject.settings.seed + 1)?;
    let broken = Broken(&other);
    nothing_changes(
        fixture,
        findings,
        ErrorKind::File,
        is_last,
        |rank, _, last| {
            let source: &dyn WeightSource = if last { &broken } else { &other };
            Ok(rank.engine.import_weights(&Weights::Policy, source).err())
        },
    )
}

/// What the guard refuses on one rank it refuses on all, whether a step is open or not.
pub(super) fn bad_batch(fixture: &Fixture, findings: &mut Findings) -> Result<()> {
    nothing_changes(
        fixture,
        findings,
        ErrorKind::Data,
        is_last,
        |rank, n, last| {
            let mut builder = BatchBuilder::new();
            let id = if last { fixture.model.vocab_size } else { 2 };
            builder.push(&[1, id as u32], None)?;
            let batch = rank.whole(&builder.build()?)?;
            let scored = rank.engine.forward(&batch, &ScoreRequest::default()).err();
            if scored.map(|e| e.kind()) != Some(ErrorKind::Data) {
                return Ok(None);
            }
            fixture.accumulate(rank, n + 40)?;
            let totals = BatchTotals::count(&batch);
            let outcome = rank
                .engine
                .forward_backward(&batch, &Nll::default(), &totals);
            rank.engine.abort()?;
            Ok(outcome.err())
        },
    )
}

/// Another number of micro-batches on one rank, and another share on one of some model-parallel peers, are refused on
/// every rank; training goes on as if they had not been.
pub(super) fn unlike_shares(fixture: &Fixture, findings: &mut Findings) -> Result<()> {
    let failed = fixture.trained(|rank, n| {
        let global = batches::eight(fixture.model.vocab_size, n)?;
        let totals = BatchTotals::count(&global);
        let other = batches::eight(fixture.model.vocab_size, n + 1)?;
        let (one, two) = (MicrobatchLimit::Sequences(1), MicrobatchLimit::Sequences(2));
        let mut shares = vec![rank.share(&global, if is_last(rank) { one } else { two })?];
        if rank.plan.mesh.data_size() < rank.world.world_size() {
            shares.push(rank.share(if is_last(rank) { &other } else { &global }, two)?);
        }
        for share in shares {
            let scored = rank.engine.forward(&share, &ScoreRequest::default()).err();
            let trained = rank
                .engine
                .forward_backward(&share, &Nll::default(), &totals)
                .err();
            for refusal in [scored, trained] {
                if refusal.map(|e| e.kind()) != Some(ErrorKind::Data) {
                    return Err(not_refused("a share that is not like the other ranks'"));
                }
            }
        }
        Ok(())
    })?;
    let plain = fixture.plainly_trained()?;
    equal(findings, "weights after the refusals", &failed, &plain);
    Ok(())
}

fn is_last(rank: &Rank) -> bool {
    rank.world.rank() + 1 == rank.world.world_size()
}

/// What `fails` returns, told the step and whether the rank is at fault, is of this kind and names a rank that is, the
/// same on every rank; and training goes on as if it had not been.
fn nothing_changes(
    fixture: &Fixture,
    findings: &mut Findings,
    kind: ErrorKind,
    faulty: impl Fn(&Rank) -> bool + Sync,
    fails: impl Fn(&mut Rank, u64, bool) -> Result<Option<Error>> + Sync,
) -> Result<()> {
    let failed = fixture.trained(|rank, n| {
        let last = faulty(rank);
        let Some(error) = fails(rank, n, last)? else {
            return Err(not_refused("the fault of one rank"));
        };
        let named = error.context("rank").and_then(|r| r.parse().ok());
        let mut flags = vec![-1i64; rank.world.world_size()];
        let own = [if last { named.unwrap_or(-1) } else { -1 }];
        let ones = vec![1; flags.len()];
        rank.world
            .all_gather(own.as_slice().into(), (&mut flags).into(), &ones)?
            .wait()?;
        // A rank that is at fault says which it names: itself or another of them.
        let at_fault = named.is_some_and(|r: i64| {
            flags.get(r as usize) == Some(&r) && flags.iter().all(|&f| f == -1 || f == r)
        });
        match error.kind() == kind && at_fault {
            true => Ok(()),
            false => Err(Error::new(
                ErrorKind::Parity,
                "conformance",
                "the error of one rank was reported otherwise on some rank",
            )
            .with("expected", format!("{kind:?}, by a rank at fault"))
            .with("found", format!("{:?}, rank {named:?}", error.kind()))
            .caused_by(error)),
        }
    })?;
    let plain = fixture.plainly_trained()?;
    equal(findings, "weights after the fault", &failed, &plain);
    Ok(())
}

/// Weights whose last tensor is announced but cannot be read.
#[derive(Debug)]
struct Broken<'a>(&'a MemoryWeights);

impl WeightSource for Broken<'_> {
    fn names(&self) -> Vec<String> {
        self.0.names()
    }

    fn describe(&self, name: &str) -> Result<(Vec<usize>, DType)> {
        self.0.describe(name)
    }

    fn read_runs(&self, name: &str, runs: &[Range<usize>]) -> Result<Vec<f32>> {
        match self.0.names().last().is_some_and(|last| last == name) {
            true => Err(
                Error::new(ErrorKind::File, "read_weights", "the disk is gone")
                    .with("tensor", name),
            ),
            false => self.0.read_runs(name, runs),
        }
    }
}

//! A fault of one rank: every rank gets an error of its kind that names it, and nothing has changed.

use std::ops::Range;

use drivetrain_core::{
    DType, Error, ErrorKind, Result,
    batch::{BatchBuilder, BatchTotals},
    engine::{Engine, ScoreRequest, Weights},
    objective::Nll,
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
        nothing_changes(fixture, findings, kind, |rank, n, last| {
            fixture.accumulate(rank, n + 40)?;
            let batch = batches::plain(fixture.model.vocab_size, n)?;
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
    nothing_changes(fixture, findings, ErrorKind::File, |rank, _, last| {
        let source: &dyn WeightSource = if last { &broken } else { &other };
        Ok(rank.engine.import_weights(&Weights::Policy, source).err())
    })
}

/// What the guard refuses on one rank it refuses on all, whether a step is open or not.
pub(super) fn bad_batch(fixture: &Fixture, findings: &mut Findings) -> Result<()> {
    nothing_changes(fixture, findings, ErrorKind::Data, |rank, n, last| {
        let mut builder = BatchBuilder::new();
        let id = if last { fixture.model.vocab_size } else { 2 };
        builder.push(&[1, id as u32], None)?;
        let batch = builder.build()?;
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
    })
}

/// What `fails` returns, told the step and whether the rank is the last, is of this kind and names the last
/// rank; and training goes on as if it had not been.
fn nothing_changes(
    fixture: &Fixture,
    findings: &mut Findings,
    kind: ErrorKind,
    fails: impl Fn(&mut Rank, u64, bool) -> Result<Option<Error>> + Sync,
) -> Result<()> {
    let named = (fixture.ranks - 1).to_string();
    let failed = fixture.trained(|rank, n| {
        let last = rank.data_index + 1 == rank.plan.mesh.data_size();
        let Some(error) = fails(rank, n, last)? else {
            return Err(not_refused("the fault of one rank"));
        };
        match (error.kind() == kind, error.context("rank")) {
            (true, Some(rank)) if rank == named => Ok(()),
            _ => Err(Error::new(
                ErrorKind::Parity,
                "conformance",
                "the error of one rank was reported otherwise on some rank",
            )
            .with("expected", format!("{kind:?}, rank {named}"))
            .with("found", format!("{:?}", error.kind()))
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

    fn read_rows(&self, name: &str, rows: Range<usize>) -> Result<Vec<f32>> {
        match self.0.names().last().is_some_and(|last| last == name) {
            true => Err(
                Error::new(ErrorKind::File, "read_weights", "the disk is gone")
                    .with("tensor", name),
            ),
            false => self.0.read_rows(name, rows),
        }
    }
}

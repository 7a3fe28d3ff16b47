//! Weights in and out, and snapshots beside the policy.

use drivetrain_core::{
    DType, ErrorKind, Result,
    engine::{Engine, Residency, Weights},
    weights::MemoryWeights,
};

use half::bf16;

use super::{
    engine_state::{Fixture, equal},
    step::Setting,
};
use crate::{
    compare::Bound,
    suite::Findings,
    train::{tensors, weights},
};

pub(super) fn export_and_import(fixture: &Fixture, findings: &mut Findings) -> Result<()> {
    let (exported, scores, again, scored_again, step) = fixture.run(|rank| {
        fixture.step(rank, 0)?;
        let mut sink = MemoryWeights::new();
        rank.engine.export_weights(&Weights::Policy, &mut sink)?;
        let exported = tensors(&sink);
        let scores = fixture.score(rank, &Weights::Policy)?;
        fixture.step(rank, 1)?;
        rank.engine.import_weights(&Weights::Policy, &sink)?;
        let again = weights(&mut rank.engine, &Weights::Policy)?;
        let scored_again = fixture.score(rank, &Weights::Policy)?;
        Ok((exported, scores, again, scored_again, rank.engine.step()))
    })?;
    let names: Vec<_> = fixture
        .model
        .parameters()
        .into_iter()
        .map(|p| p.name)
        .collect();
    let found: Vec<_> = exported.keys().cloned().collect();
    findings.fact(
        "export has every parameter, in the model's order",
        found == names,
    );
    equal(findings, "weights after import", &again, &exported);
    findings.check(
        "scores after import",
        "",
        &scored_again,
        &scores,
        Bound::Exact,
    );
    findings.fact("steps are counted", step == 2);
    Ok(())
}

pub(super) fn snapshot(fixture: &Fixture, findings: &mut Findings) -> Result<()> {
    let tag = Weights::Tag("reference".to_owned());
    let (before, kept, policy, exported, gone) = fixture.run(|rank| {
        let before = fixture.score(rank, &Weights::Policy)?;
        rank.engine.snapshot("reference")?;
        fixture.step(rank, 0)?;
        fixture.step(rank, 1)?;
        let kept = fixture.score(rank, &tag)?;
        let policy = fixture.score(rank, &Weights::Policy)?;
        let exported = weights(&mut rank.engine, &tag)?;
        rank.engine.drop_snapshot("reference")?;
        let gone = fixture.score(rank, &tag).err().map(|e| e.kind());
        Ok((before, kept, policy, exported, gone))
    })?;
    findings.check("scores of a snapshot", "", &kept, &before, Bound::Exact);
    findings.fact("the policy moves on", policy != before);
    let first = Setting::new(&fixture.model, fixture.subject.settings.seed)?;
    let first = tensors(&first.weights);
    equal(findings, "weights of a snapshot", &exported, &first);
    let refused = gone == Some(ErrorKind::Config);
    findings.fact("a dropped snapshot is unknown", refused);
    let plain = fixture.plainly_trained()?;
    let with = fixture.trained(|rank, _| rank.engine.snapshot("old"))?;
    equal(findings, "weights after snapshots", &with, &plain);
    Ok(())
}

/// State goes to host memory and comes back: what needs it on the device is refused meanwhile, and nothing else changes.
pub(super) fn offloaded(fixture: &Fixture, findings: &mut Findings) -> Result<()> {
    let plain = fixture.plainly_trained()?;
    let moved = fixture.trained(|rank, _| {
        for residency in [Residency::OptimizerOffloaded, Residency::Offloaded] {
            rank.engine.set_residency(residency)?;
            rank.engine.set_residency(Residency::Device)?;
        }
        Ok(())
    })?;
    equal(findings, "weights after offloading", &moved, &plain);
    let tag = Weights::Tag("old".to_owned());
    let (before, refused, scored, exported) = fixture.run(|rank| {
        rank.engine.snapshot("old")?;
        let before = fixture.score(rank, &tag)?;
        let mut refused = Vec::new();
        let mut ask = |asked: Result<()>| refused.push(asked.err().map(|e| e.kind()));
        rank.engine.set_residency(Residency::OptimizerOffloaded)?;
        ask(fixture.accumulate(rank, 0).map(drop));
        let scored = fixture.score(rank, &tag)?;
        rank.engine.set_residency(Residency::Offloaded)?;
        ask(fixture.accumulate(rank, 0).map(drop));
        ask(fixture.score(rank, &tag).map(drop));
        let exported = weights(&mut rank.engine, &tag)?;
        Ok((before, refused, scored, exported))
    })?;
    let all = refused == vec![Some(ErrorKind::CallOrder); 3];
    findings.fact("what needs the state on the device is out of order", all);
    findings.check("scores", "", &scored, &before, Bound::Exact);
    let first = Setting::new(&fixture.model, fixture.subject.settings.seed)?;
    equal(findings, "weights", &exported, &tensors(&first.weights));
    Ok(())
}

pub(super) fn imported_snapshot(fixture: &Fixture, findings: &mut Findings) -> Result<()> {
    let tag = Weights::Tag("teacher".to_owned());
    let teacher = crate::fixture::weights(&fixture.model, fixture.subject.settings.seed + 1)?;
    let (found, policy, exported) = fixture.run(|rank| {
        rank.engine.import_weights(&tag, &teacher)?;
        rank.engine.set_residency(Residency::Device)?;
        let found = fixture.score(rank, &tag)?;
        let policy = weights(&mut rank.engine, &Weights::Policy)?;
        Ok((found, policy, weights(&mut rank.engine, &tag)?))
    })?;
    let expected = fixture.run(|rank| {
        rank.engine.import_weights(&Weights::Policy, &teacher)?;
        fixture.score(rank, &Weights::Policy)
    })?;
    findings.check(
        "scores of an imported snapshot",
        "",
        &found,
        &expected,
        Bound::Exact,
    );
    equal(
        findings,
        "weights of an imported snapshot",
        &exported,
        &tensors(&teacher),
    );
    let first = Setting::new(&fixture.model, fixture.subject.settings.seed)?;
    let first = tensors(&first.weights);
    equal(findings, "weights of the policy beside it", &policy, &first);
    Ok(())
}

/// Weights of a bf16 model are held exactly and come out as they went in.
pub(super) fn bf16_survives(fixture: &Fixture, findings: &mut Findings) -> Result<()> {
    let mut model = fixture.model.clone();
    model.dtype = DType::Bf16;
    let drawn = crate::fixture::weights(&model, fixture.subject.settings.seed)?;
    let mut weights_in = MemoryWeights::new();
    for (name, shape, values) in drawn.iter() {
        let rounded = values.iter().map(|&v| bf16::from_f64(v).to_f64()).collect();
        weights_in.insert(name, shape, DType::Bf16, rounded)?;
    }
    let job = fixture.subject.job(&model);
    let out = fixture.subject.run_from(&job, &weights_in, |rank| {
        weights(&mut rank.engine, &Weights::Policy)
    })?;
    equal(findings, "weights", &out[0], &tensors(&weights_in));
    Ok(())
}

//! What must change nothing changes nothing, what must undo undoes, and what repeats is equal bit for bit.

use drivetrain_core::{
    ErrorKind, Result,
    batch::BatchTotals,
    engine::{Engine, ScoreRequest, StepOptions, Weights},
    model::ModelSpec,
    objective::{Aggregation, Nll, Terms},
    optim::LearningRate,
    plan::MicrobatchLimit,
};

use super::{
    experts,
    five_steps::optimizer,
    layouts::each_axis,
    one_rank::{bad_batch, failed_import, failed_objective, unlike_shares},
    snapshots::{bf16_survives, export_and_import, imported_snapshot, offloaded, snapshot},
    step::Setting,
};
use crate::{
    compare::Bound,
    fixture::{batches, model},
    suite::{Case, Findings, Layout, Needs, Rank, Subject},
    tolerance::Tensors,
    train::weights,
};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let data = [("ranks1", Layout::data(1)), ("ranks2", Layout::data(2))];
    for name in ["dense", "tied", "mixtral", "no_layers"] {
        for (label, layout) in data.into_iter().chain(each_axis()) {
            let needs = Needs {
                layout,
                ..Needs::model(&model(name))
            };
            let mut add = |what: &str, needs: Needs, run: Run| {
                cases.push(Case::new(
                    format!("state/{name}/{label}/{what}"),
                    needs,
                    move |s, f| run(&Fixture::new(name, layout, s)?, f),
                ));
            };
            let snapshots = Needs {
                snapshots: true,
                ..needs.clone()
            };
            add("repeats_bit_for_bit", needs.clone(), repeats);
            add(
                "forward_changes_nothing",
                needs.clone(),
                forward_changes_nothing,
            );
            add("dropped_steps_leave_nothing", needs.clone(), dropped_steps);
            add(
                "objective_fails_on_one_rank",
                needs.clone(),
                failed_objective,
            );
            add("import_fails_on_one_rank", needs.clone(), failed_import);
            add("bad_batch_on_one_rank", needs.clone(), bad_batch);
            if layout.num_ranks() > 1 {
                add("unlike_shares", needs.clone(), unlike_shares);
            }
            add("accumulates", needs.clone(), accumulates);
            add("deferred_divisor", needs.clone(), deferred_divisor);
            add("schedule_and_override", needs.clone(), schedule);
            add("export_and_import", needs.clone(), export_and_import);
            add("bf16_survives", needs.clone(), bf16_survives);
            let offload = Needs {
                offload: true,
                ..snapshots.clone()
            };
            add("offload", offload, offloaded);
            add("snapshot", snapshots.clone(), snapshot);
            add("imported_snapshot", snapshots, imported_snapshot);
        }
    }
    for (label, layout) in data.into_iter().chain(each_axis()) {
        let needs = Needs {
            layout,
            moe: experts::bias(),
            ..Needs::model(&model("mixtral"))
        };
        let mut add = |what: &str, snapshots: bool, run: Run| {
            let needs = Needs {
                snapshots,
                ..needs.clone()
            };
            let name = format!("state/mixtral_bias/{label}/{what}");
            cases.push(Case::new(name, needs, move |s, f| {
                run(&Fixture::new("mixtral", layout, s)?, f)
            }));
        };
        add("repeats_bit_for_bit", false, repeats);
        add("forward_changes_nothing", false, forward_changes_nothing);
        add("dropped_steps_leave_nothing", false, dropped_steps);
        add("objective_fails_on_one_rank", false, failed_objective);
        add("snapshot", true, snapshot);
        add("moves_with_committed_steps_alone", false, |fixture, f| {
            experts::bias_waits(fixture.layout, &fixture.subject, f)
        });
    }
    cases
}

type Run = fn(&Fixture, &mut Findings) -> Result<()>;

pub(super) struct Fixture {
    pub(super) model: ModelSpec,
    pub(super) layout: Layout,
    pub(super) subject: Subject,
}

impl Fixture {
    fn new(name: &str, layout: Layout, subject: &Subject) -> Result<Self> {
        Ok(Self {
            model: model(name),
            layout,
            subject: subject.clone(),
        })
    }

    /// Runs `body` on every rank, from the fixture's weights; rank 0's result.
    pub(super) fn run<T: Send>(&self, body: impl Fn(&mut Rank) -> Result<T> + Sync) -> Result<T> {
        let setting = Setting::new(&self.model, self.subject.settings.seed)?;
        let mut job = self.subject.job(&self.model);
        job.config.optimizer = optimizer();
        self.layout.lay_out(&mut job);
        let all = self.subject.run_from(&job, &setting.weights, body)?;
        Ok(all.into_iter().next().expect("at least one rank"))
    }

    /// A forward and backward pass over this rank's share of the n-th batch.
    pub(super) fn accumulate(&self, rank: &mut Rank, n: u64) -> Result<f64> {
        let seed = self.subject.settings.seed + n;
        let global = batches::eight(self.model.vocab_size, seed)?;
        let totals = BatchTotals::count(&global);
        let share = rank.share(&global, MicrobatchLimit::Sequences(2))?;
        let report = rank
            .engine
            .forward_backward(&share, &Nll::default(), &totals)?;
        Ok(report.loss)
    }

    pub(super) fn step(&self, rank: &mut Rank, n: u64) -> Result<()> {
        self.accumulate(rank, n)?;
        rank.engine.optim_step(&StepOptions::default()).map(drop)
    }

    pub(super) fn score(&self, rank: &mut Rank, which: &Weights) -> Result<Vec<f64>> {
        let batch = batches::plain(self.model.vocab_size, self.subject.settings.seed + 77)?;
        let request = ScoreRequest {
            weights: which.clone(),
            ..ScoreRequest::default()
        };
        let batch = rank.whole(&batch)?;
        Ok(rank.engine.forward(&batch, &request)?.log_probs)
    }

    /// Weights after steps 0, 1 and 2, with something done before each.
    pub(super) fn trained(
        &self,
        before: impl Fn(&mut Rank, u64) -> Result<()> + Sync,
    ) -> Result<Tensors> {
        self.run(|rank| {
            for n in 0..3 {
                before(rank, n)?;
                self.step(rank, n)?;
            }
            weights(&mut rank.engine, &Weights::Policy)
        })
    }

    pub(super) fn plainly_trained(&self) -> Result<Tensors> {
        self.trained(|_, _| Ok(()))
    }
}

pub(super) fn equal(findings: &mut Findings, what: &str, found: &Tensors, expected: &Tensors) {
    let names = found.keys().eq(expected.keys());
    findings.fact("the same parameters in the same order", names);
    for (name, expected) in expected {
        let found = found.get(name).map(Vec::as_slice).unwrap_or_default();
        findings.check(what, name, found, expected, Bound::Exact);
    }
}

fn repeats(fixture: &Fixture, findings: &mut Findings) -> Result<()> {
    let (first, second) = (fixture.plainly_trained()?, fixture.plainly_trained()?);
    equal(findings, "weights of a second run", &second, &first);
    Ok(())
}

fn forward_changes_nothing(fixture: &Fixture, findings: &mut Findings) -> Result<()> {
    let plain = fixture.plainly_trained()?;
    let between = fixture.trained(|rank, _| fixture.score(rank, &Weights::Policy).map(drop))?;
    equal(
        findings,
        "weights after scoring between steps",
        &between,
        &plain,
    );
    let within = fixture.run(|rank| {
        for n in 0..3 {
            fixture.accumulate(rank, n)?;
            fixture.score(rank, &Weights::Policy)?;
            rank.engine.optim_step(&StepOptions::default())?;
        }
        weights(&mut rank.engine, &Weights::Policy)
    })?;
    equal(
        findings,
        "weights after scoring within steps",
        &within,
        &plain,
    );
    Ok(())
}

fn dropped_steps(fixture: &Fixture, findings: &mut Findings) -> Result<()> {
    let plain = fixture.plainly_trained()?;
    let aborted = fixture.trained(|rank, n| {
        fixture.accumulate(rank, n + 40)?;
        rank.engine.abort()
    })?;
    equal(findings, "weights after aborted steps", &aborted, &plain);
    let zeroed = fixture.trained(|rank, n| {
        fixture.accumulate(rank, n + 40)?;
        rank.engine.zero_grad()
    })?;
    equal(findings, "weights after zero_grad", &zeroed, &plain);
    Ok(())
}

/// Two halves of a batch, accumulated, make the whole batch's step.
fn accumulates(fixture: &Fixture, findings: &mut Findings) -> Result<()> {
    let seed = fixture.subject.settings.seed;
    let global = batches::eight(fixture.model.vocab_size, seed)?;
    let totals = BatchTotals::count(&global);
    let halves = [
        global.select(&(0..4).collect::<Vec<_>>()),
        global.select(&(4..8).collect::<Vec<_>>()),
    ];
    let (whole, norm) = fixture.run(|rank| {
        let share = rank.share(&global, MicrobatchLimit::All)?;
        let report = rank
            .engine
            .forward_backward(&share, &Nll::default(), &totals)?;
        let step = rank.engine.optim_step(&StepOptions::default())?;
        Ok((report.loss, step.grad_norm))
    })?;
    let (parts, parts_norm) = fixture.run(|rank| {
        let mut loss = 0.0;
        for half in &halves {
            let share = rank.share(half, MicrobatchLimit::All)?;
            let report = rank
                .engine
                .forward_backward(&share, &Nll::default(), &totals)?;
            loss += report.loss;
        }
        let step = rank.engine.optim_step(&StepOptions::default())?;
        Ok((loss, step.grad_norm))
    })?;
    let relative = crate::tolerance::BETWEEN_LAYOUTS;
    findings.number("loss", "halves", parts, whole, relative * whole.abs());
    findings.number("grad_norm", "halves", parts_norm, norm, relative * norm);
    Ok(())
}

/// A sum divided in `optim_step` is the mean.
fn deferred_divisor(fixture: &Fixture, findings: &mut Findings) -> Result<()> {
    let seed = fixture.subject.settings.seed;
    let global = batches::eight(fixture.model.vocab_size, seed)?;
    let totals = BatchTotals::count(&global);
    let norm = |objective: Nll, options: StepOptions| {
        fixture.run(|rank| {
            let share = rank.share(&global, MicrobatchLimit::All)?;
            rank.engine.forward_backward(&share, &objective, &totals)?;
            Ok(rank.engine.optim_step(&options)?.grad_norm)
        })
    };
    let mean = norm(Nll::default(), StepOptions::default())?;
    let sum = Nll {
        terms: Terms::new(Aggregation::Constant(1.0)),
    };
    let options = StepOptions {
        gradient_divisor: Some(totals.tokens as f64),
        ..StepOptions::default()
    };
    let tolerance = crate::tolerance::BETWEEN_LAYOUTS * mean;
    findings.number(
        "grad_norm",
        "deferred",
        norm(sum, options)?,
        mean,
        tolerance,
    );
    Ok(())
}

fn schedule(fixture: &Fixture, findings: &mut Findings) -> Result<()> {
    let setting = Setting::new(&fixture.model, fixture.subject.settings.seed)?;
    let mut job = fixture.subject.job(&fixture.model);
    fixture.layout.lay_out(&mut job);
    job.config.steps = 6;
    job.config.schedule.kind = drivetrain_core::config::ScheduleKind::Cosine;
    job.config.schedule.warmup_steps = 2;
    let expected: Vec<_> = (0..6)
        .map(|n| LearningRate::new(&job.config).at(n))
        .collect();
    let rates = fixture.subject.run_from(&job, &setting.weights, |rank| {
        let mut rates = Vec::new();
        for n in 0..6 {
            fixture.accumulate(rank, n)?;
            let report = rank.engine.optim_step(&StepOptions::default())?;
            rates.push(report.learning_rate);
        }
        let before = weights(&mut rank.engine, &Weights::Policy)?;
        fixture.accumulate(rank, 6)?;
        let frozen = StepOptions {
            learning_rate: Some(0.0),
            ..StepOptions::default()
        };
        let report = rank.engine.optim_step(&frozen)?;
        let after = weights(&mut rank.engine, &Weights::Policy)?;
        Ok((rates, report.learning_rate, before, after))
    })?;
    let (rates, zero, before, after) = &rates[0];
    findings.check(
        "learning_rate",
        "cosine",
        rates,
        &expected,
        Bound::Uniform(0.0),
    );
    findings.number("learning_rate", "override", *zero, 0.0, 0.0);
    equal(findings, "weights after a step at rate 0", after, before);
    Ok(())
}

/// An error of a case: something was allowed that must be refused.
pub(super) fn not_refused(what: &str) -> drivetrain_core::Error {
    let message = format!("{what} was not refused");
    drivetrain_core::Error::new(ErrorKind::Parity, "conformance", message)
}

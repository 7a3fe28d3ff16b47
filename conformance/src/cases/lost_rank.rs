//! A rank lost at any operation of a step: either no rank has committed the step, and their step counts say
//! so, or every rank that did not complete it is poisoned and refuses every call.

use drivetrain_core::{
    ErrorKind, Result,
    batch::BatchTotals,
    engine::{Engine, ScoreRequest, StepOptions},
    objective::Nll,
    plan::MicrobatchLimit,
};

use super::{layouts::each_axis, step::Setting};
use crate::{
    fixture::{batches, model},
    suite::{Case, Findings, Layout, Needs, Rank, Subject},
};

/// A step of the fixtures has fewer operations.
const MOST: i64 = 2000;

pub(super) fn cases() -> Vec<Case> {
    let case = |name: &'static str, case: String, layout: Layout| {
        let needs = Needs {
            layout,
            ..Needs::model(&model(name))
        };
        Case::new(case, needs, move |s, f| {
            at_any_operation(name, layout, s, f)
        })
    };
    let data = ["dense", "no_layers"].map(|name| {
        let layout = Layout::data(2);
        case(name, format!("lost_rank/{name}"), layout)
    });
    let split = each_axis().into_iter().map(|(label, layout)| {
        let name = if label == "ep2" { "mixtral" } else { "dense" };
        case(name, format!("lost_rank/{name}/{label}"), layout)
    });
    data.into_iter().chain(split).collect()
}

/// How a rank came out of the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Committed,
    Untouched,
    Poisoned,
    /// It failed, but counts the step, or is poisoned without refusing.
    Muddled,
}

fn at_any_operation(
    name: &str,
    layout: Layout,
    subject: &Subject,
    findings: &mut Findings,
) -> Result<()> {
    let model = model(name);
    let setting = Setting::new(&model, subject.settings.seed)?;
    let mut job = subject.job(&model);
    layout.lay_out(&mut job);
    let ranks = layout.num_ranks();
    let (mut tried, mut all) = (0, false);
    for operations in 0..MOST {
        let ends = subject.run_from(&job, &setting.weights, |rank| {
            step(rank, model.vocab_size, 0)?;
            // Every rank is out of the first step before one is lost in the second.
            rank.world.barrier()?;
            if rank.world.rank() + 1 == ranks {
                rank.fault.arm(operations);
            }
            let outcome = step(rank, model.vocab_size, 1);
            let struck = rank.fault.struck();
            Ok((end(rank, &outcome, model.vocab_size), struck))
        })?;
        if !ends.iter().any(|(_, struck)| *struck) {
            all = true;
            break;
        }
        tried += 1;
        let is = |e: End| ends.iter().filter(|(end, _)| *end == e).count();
        let together = is(End::Untouched) == ranks || is(End::Untouched) + is(End::Muddled) == 0;
        let what =
            format!("lost at operation {operations}: no rank commits, or the rest is poisoned");
        findings.fact(&what, together);
    }
    findings.fact("a step has operations to be lost at", tried > 0);
    findings.fact("every operation of the step was tried", all);
    Ok(())
}

fn step(rank: &mut Rank, vocab_size: usize, n: u64) -> Result<()> {
    let global = batches::eight(vocab_size, n)?;
    let totals = BatchTotals::count(&global);
    let share = rank.share(&global, MicrobatchLimit::Sequences(2))?;
    rank.engine
        .forward_backward(&share, &Nll::default(), &totals)?;
    rank.engine.optim_step(&StepOptions::default()).map(drop)
}

fn end(rank: &mut Rank, outcome: &Result<()>, vocab_size: usize) -> End {
    let steps = rank.engine.step();
    let Err(error) = outcome else {
        return if steps == 2 {
            End::Committed
        } else {
            End::Muddled
        };
    };
    if error.kind() != ErrorKind::Poisoned {
        return if steps == 1 {
            End::Untouched
        } else {
            End::Muddled
        };
    }
    let scores = batches::plain(vocab_size, 0)
        .and_then(|batch| rank.whole(&batch))
        .and_then(|batch| rank.engine.forward(&batch, &ScoreRequest::default()));
    match scores {
        Err(error) if error.kind() == ErrorKind::Poisoned => End::Poisoned,
        _ => End::Muddled,
    }
}

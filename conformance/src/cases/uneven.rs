//! Ranks that do not share alike: one rank's bad gradient, ranks without a sequence, rows that do not divide.

use drivetrain_core::{
    Result,
    batch::{BatchBuilder, BatchTotals, Column, ColumnData},
    engine::{Engine, ScoreRequest, StepOptions, Weights},
    model::{Family, MlpSpec, ModelSpec},
    objective::Nll,
    plan::MicrobatchLimit,
};

use super::{engine_state::equal, five_steps::optimizer, layouts::each_axis, step::Setting};
use crate::{
    compare::Bound,
    fixture::{batches, dense, model},
    objective::{POISON, Poisoned},
    suite::{Case, Findings, Layout, Needs, Subject},
    train::{tensors, weights},
};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let data = [("ranks1", 1), ("ranks2", 2), ("ranks4", 4)];
    let data = data.map(|(label, ranks)| (label, Layout::data(ranks)));
    for (label, layout) in data.into_iter().chain(each_axis()) {
        let needs = Needs {
            layout,
            ..Needs::model(&model("dense"))
        };
        let mut add = |what: &str, run: fn(Layout, &Subject, &mut Findings) -> Result<()>| {
            let full = format!("uneven/{label}/{what}");
            cases.push(Case::new(full, needs.clone(), move |s, f| {
                run(layout, s, f)
            }));
        };
        add("non_finite_gradient_skips_everywhere", non_finite);
        add("fewer_sequences_than_ranks", fewer_sequences);
        add("seven_evaluated", seven_evaluated);
    }
    for ranks in [2, 3, 4] {
        for rows in [1, 5, 97] {
            let model = uneven(rows);
            let needs = Needs {
                layout: Layout::data(ranks),
                ..Needs::model(&model)
            };
            let name = format!("uneven/ranks{ranks}/rows_of_{rows}");
            cases.push(Case::new(name, needs, move |s, f| {
                uneven_rows(rows, ranks, s, f)
            }));
        }
    }
    cases
}

/// One rank's infinite gradient: every rank skips, nothing changes, and the next step is as if it had not been.
fn non_finite(layout: Layout, subject: &Subject, findings: &mut Findings) -> Result<()> {
    let model = model("dense");
    let setting = Setting::new(&model, subject.settings.seed)?;
    let mut job = subject.job(&model);
    job.config.optimizer = optimizer();
    layout.lay_out(&mut job);
    let nll = Nll::default();
    let run = |poisoned: bool| {
        subject.run_from(&job, &setting.weights, |rank| {
            let mut skipped = Vec::new();
            for n in 0..3 {
                let mut global = batches::eight(model.vocab_size, subject.settings.seed + n)?;
                let totals = BatchTotals::count(&global);
                if n == 1 && !poisoned {
                    continue;
                }
                let mut marks = vec![0u8; 8];
                marks[6] = u8::from(n == 1);
                global.set_column(POISON, Column::per_sequence(ColumnData::U8(marks)))?;
                let share = rank.share(&global, MicrobatchLimit::Sequences(1))?;
                let objective = Poisoned(&nll);
                rank.engine.forward_backward(&share, &objective, &totals)?;
                let before = weights(&mut rank.engine, &Weights::Policy)?;
                let step = rank.engine.optim_step(&StepOptions::default())?;
                let after = weights(&mut rank.engine, &Weights::Policy)?;
                let unclipped = step.clip_factor == 1.0;
                let sound =
                    step.grad_norm.is_finite() != step.skipped && (unclipped || !step.skipped);
                skipped.push((step.skipped, before == after, sound, step.step));
            }
            let end = weights(&mut rank.engine, &Weights::Policy)?;
            Ok((skipped, rank.engine.step(), end))
        })
    };
    let (bad, clean) = (run(true)?, run(false)?);
    let expected = [
        (false, false, true, 1),
        (true, true, true, 1),
        (false, false, true, 2),
    ];
    let alike = bad
        .iter()
        .all(|(steps, count, _)| steps[..] == expected && *count == 2);
    findings.fact("every rank skips the bad step, and only that", alike);
    for (_, _, end) in &bad {
        equal(findings, "weights", end, &clean[0].2);
    }
    Ok(())
}

/// Ranks without a sequence take part and the result is the same.
fn fewer_sequences(layout: Layout, subject: &Subject, findings: &mut Findings) -> Result<()> {
    let model = model("dense");
    let setting = Setting::new(&model, subject.settings.seed)?;
    let batch = batches::scored(&[(6, 4)], model.vocab_size, subject.settings.seed)?;
    let layout = layout.sequences(1);
    setting.check_step(subject, findings, &batch, &Nll::default(), layout)?;
    let none = BatchBuilder::new().build()?;
    setting.check_step(subject, findings, &none, &Nll::default(), layout)
}

/// Seven sequences scored on some ranks: it ends, and every score is that of one rank.
fn seven_evaluated(layout: Layout, subject: &Subject, findings: &mut Findings) -> Result<()> {
    let model = model("dense");
    let setting = Setting::new(&model, subject.settings.seed)?;
    let batch = batches::eight(model.vocab_size, subject.settings.seed)?;
    let batch = batch.select(&(0..7).collect::<Vec<_>>());
    let whole = setting.score(subject, &batch, &ScoreRequest::default())?;
    let mut job = subject.job(&model);
    layout.lay_out(&mut job);
    let parts = subject.run_from(&job, &setting.weights, |rank| {
        let limit = MicrobatchLimit::Sequences(2);
        // What each rank's engine gave, then what the ranks make of it together.
        let share = rank.share(&batch, limit)?;
        let own = rank.engine.forward(&share, &ScoreRequest::default())?;
        let all = rank.score(&batch, limit, &ScoreRequest::default())?;
        Ok((rank.data_index, own, all))
    })?;
    let tolerance = setting.tolerances(subject, &batch, 1.0)?.log_prob;
    for (index, own, all) in &parts {
        let peer = parts.iter().find(|(other, ..)| other == index);
        let alike = peer.is_some_and(|(_, peer, _)| peer == own);
        findings.fact("model-parallel peers have the same outputs", alike);
        findings.check(
            "log_probs",
            "",
            &all.log_probs,
            &whole.log_probs,
            Bound::Uniform(tolerance),
        );
    }
    Ok(())
}

/// A model whose embedding has this many rows and whose other first dims are odd.
fn uneven(rows: usize) -> ModelSpec {
    let mut model = dense(Family::Llama, 1);
    model.vocab_size = rows;
    (model.num_heads, model.num_kv_heads, model.head_dim) = (3, 1, 2);
    model.hidden_size = 5;
    model.layers[0].mlp = MlpSpec::Dense { ffn_size: 7 };
    model
}

/// First dims that no rank count divides: padding enters neither norm, nor optimizer, nor export.
fn uneven_rows(
    rows: usize,
    ranks: usize,
    subject: &Subject,
    findings: &mut Findings,
) -> Result<()> {
    let model = uneven(rows);
    let setting = Setting::new(&model, subject.settings.seed)?;
    let batch = batches::eight(rows, subject.settings.seed)?;
    let layout = Layout::data(ranks).sequences(2);
    setting.check_step(subject, findings, &batch, &Nll::default(), layout)?;
    let mut job = subject.job(&model);
    job.config.parallel.data_parallel_size = ranks;
    let exported = subject.run_from(&job, &setting.weights, |rank| {
        weights(&mut rank.engine, &Weights::Policy)
    })?;
    let first = tensors(&setting.weights);
    for exported in &exported {
        equal(findings, "exported weights", exported, &first);
    }
    Ok(())
}

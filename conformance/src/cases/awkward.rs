//! Batches and gradients that public projects got wrong, each with the right value.

use drivetrain_core::{
    Result,
    batch::{Batch, BatchBuilder, BatchTotals, Column, ColumnData},
    engine::{Engine, ScoreRequest, StepOptions},
    objective::Nll,
    plan::MicrobatchLimit,
};

use super::{
    engine_state::equal,
    step::{Setting, oracle},
};
use crate::{
    compare::Bound,
    fixture::{batches, model, models},
    objective::{Polynomial, WEIGHTS},
    suite::{Case, Findings, Layout, Needs, Subject},
    tolerance::BETWEEN_LAYOUTS,
    train::gradients,
};

/// Each sequence is a micro-batch.
fn each() -> Layout {
    Layout::default().sequences(1)
}

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for name in ["dense", "tied", "q3", "mixtral", "no_layers"] {
        let needs = Needs::model(&model(name));
        let gradients = Needs {
            export_gradients: true,
            ..needs.clone()
        };
        let entropy = Needs {
            entropy: true,
            ..needs.clone()
        };
        let mut add =
            |what: &str, needs: &Needs, run: fn(&str, &Subject, &mut Findings) -> Result<()>| {
                let full = format!("awkward/{name}/{what}");
                cases.push(Case::new(full, needs.clone(), move |s, f| run(name, s, f)));
            };
        add("masked_sequence_adds_nothing", &gradients, masked_sequence);
        add("divides_by_scored_tokens", &needs, divides_by_scored_tokens);
        add("nothing_scored", &gradients, nothing_scored);
        add("one_token_scored", &needs, one_token);
        add("sequences_of_one_token", &needs, sequences_of_one_token);
        add("no_sequences", &needs, no_sequences);
        add("empty_sequence", &needs, empty_sequence);
        add("masked_slots_are_nothing", &needs, masked_slots);
        add("scores_do_not_depend_on_neighbours", &needs, neighbours);
        add("scores_ignore_the_mask", &needs, scores_ignore_the_mask);
        add("uniform_logits", &entropy, uniform_logits);
        add("clips_to_the_limit", &needs, clips);
    }
    for fixture in models() {
        let needs = Needs {
            export_gradients: true,
            ..Needs::model(&fixture.model)
        };
        let name = format!("awkward/{}/every_tensor_learns", fixture.name);
        cases.push(Case::new(name, needs, move |s, f| {
            every_tensor_learns(fixture.name, s, f)
        }));
    }
    cases
}

fn plain(name: &str, subject: &Subject) -> Result<Batch> {
    batches::plain(model(name).vocab_size, subject.settings.seed)
}

/// Four sequences, one fully masked, one a micro-batch: the gradient is that of the other three alone.
fn masked_sequence(name: &str, subject: &Subject, findings: &mut Findings) -> Result<()> {
    let model = model(name);
    let setting = Setting::new(&model, subject.settings.seed)?;
    let with = plain(name, subject)?;
    let without = with.select(&[0, 1, 2]);
    let nll = Nll::default();
    let found = setting.step(subject, &with, &nll, each())?;
    let expected = setting.step(subject, &without, &nll, each())?;
    let tolerance = BETWEEN_LAYOUTS * expected.loss.abs();
    findings.number("loss", "", found.loss, expected.loss, tolerance);
    for (name, expected) in &expected.gradients {
        let bound = Bound::Uniform(BETWEEN_LAYOUTS * crate::compare::largest(expected));
        findings.check("gradient", name, &found.gradients[name], expected, bound);
    }
    setting.check_step(subject, findings, &with, &nll, each())
}

/// Four scored tokens and a masked sequence: the sum is divided by 4, not by 5.
fn divides_by_scored_tokens(name: &str, subject: &Subject, findings: &mut Findings) -> Result<()> {
    let model = model(name);
    let setting = Setting::new(&model, subject.settings.seed)?;
    let shape = [(7, 4), (5, 0)];
    let batch = batches::scored(&shape, model.vocab_size, subject.settings.seed)?;
    let scores = setting.score(subject, &batch, &ScoreRequest::default())?;
    let scored = batch.scored();
    let sum: f64 = (0..batch.num_tokens())
        .filter(|&t| scored[t])
        .map(|t| scores.log_probs[t])
        .sum();
    let step = setting.step(subject, &batch, &Nll::default(), each())?;
    let tolerance = setting.tolerances(subject, &batch, 1.0)?.log_prob;
    findings.number("loss", "", step.loss, -sum / 4.0, tolerance);
    Ok(())
}

/// An all-zero mask: loss, gradients and norm are 0, and the step happens.
fn nothing_scored(name: &str, subject: &Subject, findings: &mut Findings) -> Result<()> {
    let model = model(name);
    let setting = Setting::new(&model, subject.settings.seed)?;
    let shape = [(7, 0), (1, 0), (5, 0)];
    let batch = batches::scored(&shape, model.vocab_size, subject.settings.seed)?;
    let totals = BatchTotals::count(&batch);
    let job = subject.job(&model);
    let results = subject.run_from(&job, &setting.weights, |rank| {
        let share = rank.share(&batch, MicrobatchLimit::Sequences(2))?;
        let report = rank
            .engine
            .forward_backward(&share, &Nll::default(), &totals)?;
        let finite = report.metrics.iter().all(|(_, m)| m.value().is_finite());
        let gradients = gradients(&mut rank.engine)?;
        let step = rank.engine.optim_step(&StepOptions::default())?;
        Ok((report.loss, finite, gradients, step))
    })?;
    let (loss, finite, gradients, step) = &results[0];
    findings.number("loss", "", *loss, 0.0, 0.0);
    findings.fact("metrics are finite", *finite);
    for (name, values) in gradients {
        let zeros = vec![0.0; values.len()];
        findings.check("gradient", name, values, &zeros, Bound::Uniform(0.0));
    }
    findings.number("grad_norm", "", step.grad_norm, 0.0, 0.0);
    findings.fact("the step is not skipped", !step.skipped && step.step == 1);
    Ok(())
}

fn one_token(name: &str, subject: &Subject, findings: &mut Findings) -> Result<()> {
    let model = model(name);
    let setting = Setting::new(&model, subject.settings.seed)?;
    for shape in [&[(2, 1)][..], &[(9, 0), (4, 1), (1, 0)][..]] {
        let batch = batches::scored(shape, model.vocab_size, subject.settings.seed)?;
        setting.check_step(subject, findings, &batch, &Nll::default(), each())?;
    }
    Ok(())
}

fn sequences_of_one_token(name: &str, subject: &Subject, findings: &mut Findings) -> Result<()> {
    let model = model(name);
    let setting = Setting::new(&model, subject.settings.seed)?;
    let shape = [(1, 0), (1, 0), (4, 3), (1, 0)];
    let batch = batches::scored(&shape, model.vocab_size, subject.settings.seed)?;
    let request = ScoreRequest::default();
    setting.check_scores(subject, findings, &batch, &request)?;
    setting.check_step(subject, findings, &batch, &Nll::default(), each())?;
    let only = batches::scored(&[(1, 0)], model.vocab_size, subject.settings.seed)?;
    setting.check_scores(subject, findings, &only, &request)?;
    setting.check_step(subject, findings, &only, &Nll::default(), Layout::default())
}

fn no_sequences(name: &str, subject: &Subject, findings: &mut Findings) -> Result<()> {
    let model = model(name);
    let setting = Setting::new(&model, subject.settings.seed)?;
    let batch = BatchBuilder::new().build()?;
    setting.check_scores(subject, findings, &batch, &ScoreRequest::default())?;
    setting.check_step(
        subject,
        findings,
        &batch,
        &Nll::default(),
        Layout::default(),
    )
}

fn empty_sequence(name: &str, subject: &Subject, findings: &mut Findings) -> Result<()> {
    let model = model(name);
    let setting = Setting::new(&model, subject.settings.seed)?;
    let mut builder = BatchBuilder::new();
    builder.push(&[1, 2, 3], None)?;
    builder.push(&[], None)?;
    builder.push(&[4, 5], None)?;
    let batch = builder.build()?;
    setting.check_scores(subject, findings, &batch, &ScoreRequest::default())?;
    setting.check_step(subject, findings, &batch, &Nll::default(), each())
}

/// NaN in the columns of unscored tokens changes nothing: masks select, they do not multiply.
fn masked_slots(name: &str, subject: &Subject, findings: &mut Findings) -> Result<()> {
    let model = model(name);
    let setting = Setting::new(&model, subject.settings.seed)?;
    let batch = batches::with_columns(plain(name, subject)?, model.vocab_size, 3)?;
    let scored = batch.scored();
    let column = batch.column(WEIGHTS).map(Column::to_f64);
    let poisoned = column.unwrap_or_default().into_iter().zip(&scored);
    let poisoned = poisoned.map(|(w, &s)| if s { w } else { f64::NAN });
    let poisoned = Column::per_token(ColumnData::F64(poisoned.collect()));
    let mut with = batch.clone();
    with.set_column(WEIGHTS, poisoned)?;
    let objective = Polynomial {
        temperature: 1.0,
        entropy: false,
        at_ids: false,
    };
    let found = setting.step(subject, &with, &objective, each())?;
    let expected = setting.step(subject, &batch, &objective, each())?;
    findings.check("loss", "", &[found.loss], &[expected.loss], Bound::Exact);
    equal(findings, "gradient", &found.gradients, &expected.gradients);
    Ok(())
}

/// A sequence scores the same alone and among others, wherever it lies.
fn neighbours(name: &str, subject: &Subject, findings: &mut Findings) -> Result<()> {
    let model = model(name);
    let setting = Setting::new(&model, subject.settings.seed)?;
    let batch = plain(name, subject)?;
    let tolerance = setting.tolerances(subject, &batch, 1.0)?.log_prob;
    let together = setting.score(subject, &batch, &ScoreRequest::default())?;
    for s in 0..batch.num_sequences() {
        let alone = batch.select(&[s]);
        let alone = setting.score(subject, &alone, &ScoreRequest::default())?;
        let found = &together.log_probs[batch.sequence(s)];
        let of = format!("sequence {s}");
        findings.check(
            "log_probs",
            &of,
            found,
            &alone.log_probs,
            Bound::Uniform(tolerance),
        );
    }
    let back = batch.select(&[3, 2, 1, 0]);
    let back_scores = setting.score(subject, &back, &ScoreRequest::default())?;
    let found = &back_scores.log_probs[back.sequence(1)];
    let expected = &together.log_probs[batch.sequence(2)];
    findings.check(
        "log_probs",
        "moved",
        found,
        expected,
        Bound::Uniform(tolerance),
    );
    Ok(())
}

/// Scoring is of every token but the first, whatever the mask says.
fn scores_ignore_the_mask(name: &str, subject: &Subject, findings: &mut Findings) -> Result<()> {
    let model = model(name);
    let setting = Setting::new(&model, subject.settings.seed)?;
    let batch = plain(name, subject)?;
    let scores = setting
        .score(subject, &batch, &ScoreRequest::default())?
        .log_probs;
    let first: Vec<_> = batch.starts()[..batch.num_sequences()].to_vec();
    let right = |t: usize| {
        if first.contains(&t) {
            scores[t] == 0.0
        } else {
            scores[t] < 0.0
        }
    };
    findings.fact(
        "as many scores as tokens",
        scores.len() == batch.num_tokens(),
    );
    let all = (0..scores.len()).all(right);
    findings.fact("0 for first tokens, below 0 for all others", all);
    Ok(())
}

/// Uniform logits over 97 ids: log-probs and entropy are ln 97 = 4.574711, in any order of asking.
fn uniform_logits(name: &str, subject: &Subject, findings: &mut Findings) -> Result<()> {
    let mut model = model(name);
    model.tied_embeddings = false;
    let mut weights = crate::fixture::weights(&model, subject.settings.seed)?;
    let zeros = vec![0.0; model.vocab_size * model.hidden_size];
    let shape = [model.vocab_size, model.hidden_size];
    weights.insert("lm_head.weight", &shape, model.dtype, zeros)?;
    let batch = plain(name, subject)?;
    let job = subject.job(&model);
    let plain = ScoreRequest::default();
    let both = ScoreRequest {
        entropy: true,
        temperature: 0.5,
        ..ScoreRequest::default()
    };
    let scores = subject.run_from(&job, &weights, |rank| {
        let first = rank.engine.forward(&batch, &plain)?;
        let entropies = rank.engine.forward(&batch, &both)?;
        let again = rank.engine.forward(&batch, &plain)?;
        Ok((first, entropies, again))
    })?;
    let (first, entropies, again) = &scores[0];
    let expected = |value: f64| {
        let mut all = vec![value; batch.num_tokens()];
        let starts = &batch.starts()[..batch.num_sequences()];
        starts.iter().for_each(|&t| all[t] = 0.0);
        all
    };
    let bound = Bound::Uniform(1e-6);
    let log_probs = expected(-4.574_710_978_503_383);
    findings.check("log_probs", "", &first.log_probs, &log_probs, bound);
    findings.check(
        "log_probs",
        "with entropy",
        &entropies.log_probs,
        &log_probs,
        bound,
    );
    let entropy = entropies.entropy.as_deref().unwrap_or_default();
    findings.check(
        "entropy",
        "",
        entropy,
        &expected(4.574_710_978_503_383),
        bound,
    );
    findings.check(
        "log_probs",
        "again",
        &again.log_probs,
        &first.log_probs,
        Bound::Exact,
    );
    Ok(())
}

/// A gradient clipped to 0.01 has norm 0.01, and a limit above the norm does nothing.
fn clips(name: &str, subject: &Subject, findings: &mut Findings) -> Result<()> {
    let model = model(name);
    let setting = Setting::new(&model, subject.settings.seed)?;
    let batch = plain(name, subject)?;
    let totals = BatchTotals::count(&batch);
    let mut factors = Vec::new();
    for max in [Some(0.01), Some(1e9), None] {
        let mut job = subject.job(&model);
        job.config.optimizer.max_grad_norm = max;
        let steps = subject.run_from(&job, &setting.weights, |rank| {
            rank.engine
                .forward_backward(&batch, &Nll::default(), &totals)?;
            rank.engine.optim_step(&StepOptions::default())
        })?;
        factors.push(steps[0].clone());
    }
    let clipped = factors[0].clip_factor * factors[0].grad_norm;
    findings.number("clipped norm", "", clipped, 0.01, 1e-6);
    findings.number(
        "clip_factor",
        "limit above",
        factors[1].clip_factor,
        1.0,
        0.0,
    );
    findings.number("clip_factor", "no limit", factors[2].clip_factor, 1.0, 0.0);
    let norms = [factors[0].grad_norm, factors[1].grad_norm];
    findings.number("grad_norm", "before clipping", norms[0], norms[1], 0.0);
    Ok(())
}

/// After one batch every tensor has a finite gradient that is not 0 (where the oracle's is not: an expert may
/// have had no token).
fn every_tensor_learns(name: &str, subject: &Subject, findings: &mut Findings) -> Result<()> {
    let model = model(name);
    let setting = Setting::new(&model, subject.settings.seed)?;
    let batch = batches::eight(model.vocab_size, subject.settings.seed)?;
    let found = setting.step(subject, &batch, &Nll::default(), Layout::default())?;
    let exact = setting.step(&oracle(subject), &batch, &Nll::default(), Layout::default())?;
    let reached = |values: &[f64]| values.iter().any(|&g| g != 0.0);
    for parameter in model.parameters() {
        let values = found.gradients.get(&parameter.name);
        let values = values.map(Vec::as_slice).unwrap_or_default();
        let finite = values.iter().all(|g| g.is_finite());
        let learns = reached(values) == reached(&exact.gradients[&parameter.name]);
        let dense = parameter.expert.is_some() || reached(values);
        let what = format!("{} has a finite gradient, not 0", parameter.name);
        findings.fact(&what, finite && learns && dense);
    }
    Ok(())
}

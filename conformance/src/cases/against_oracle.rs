//! Against the oracle on the fixtures: scores, and one step of every kind of loss.

use drivetrain_core::{
    Result,
    engine::ScoreRequest,
    objective::{Aggregation, Nll, Objective, Terms},
};

use super::step::Setting;
use crate::{
    fixture::{ModelFixture, batches, models},
    objective::{IDS, Polynomial},
    suite::{Case, Findings, Layout, Needs, Subject},
};

pub(super) fn cases() -> Vec<Case> {
    models().into_iter().flat_map(of_model).collect()
}

fn of_model(fixture: ModelFixture) -> Vec<Case> {
    let ModelFixture { name, model } = fixture;
    let needs = Needs::model(&model);
    let entropy = Needs {
        entropy: true,
        ..needs.clone()
    };
    let at_ids = Needs {
        log_probs_at: true,
        ..needs.clone()
    };
    let scores = |what: &str, needs: &Needs, request: ScoreRequest| {
        let model = model.clone();
        Case::new(format!("oracle/{name}/scores{what}"), needs.clone(), {
            move |subject, findings| {
                let setting = Setting::new(&model, subject.settings.seed)?;
                let vocab = model.vocab_size;
                let batch = batches::plain(vocab, subject.settings.seed)?;
                let batch = batches::with_columns(batch, vocab, subject.settings.seed)?;
                setting.check_scores(subject, findings, &batch, &request)
            }
        })
    };
    let warm = ScoreRequest {
        temperature: 0.5,
        ..ScoreRequest::default()
    };
    let with_entropy = ScoreRequest {
        entropy: true,
        ..warm.clone()
    };
    let with_ids = ScoreRequest {
        log_probs_at: Some(IDS.to_owned()),
        ..ScoreRequest::default()
    };
    let polynomial = |entropy, at_ids| Polynomial {
        temperature: 0.7,
        entropy,
        at_ids,
    };
    let sequence_mean = Nll {
        terms: Terms {
            temperature: 1.5,
            ..Terms::new(Aggregation::SequenceMean)
        },
    };
    let step = |what: &str, needs: &Needs, objective: Box<dyn Objective>| {
        let model = model.clone();
        let run = move |subject: &Subject, findings: &mut Findings| -> Result<()> {
            let setting = Setting::new(&model, subject.settings.seed)?;
            let vocab = model.vocab_size;
            let batch = batches::plain(vocab, subject.settings.seed)?;
            let batch = batches::with_columns(batch, vocab, subject.settings.seed)?;
            setting.check_step(subject, findings, &batch, &*objective, Layout::default())
        };
        Case::new(format!("oracle/{name}/{what}"), needs.clone(), run)
    };
    vec![
        scores("", &needs, ScoreRequest::default()),
        scores("_temperature", &needs, warm),
        scores("_entropy", &entropy, with_entropy),
        scores("_at_ids", &at_ids, with_ids),
        step("nll", &needs, Box::<Nll>::default()),
        step("nll_sequence_mean", &needs, Box::new(sequence_mean)),
        step("polynomial", &needs, Box::new(polynomial(false, false))),
        step(
            "polynomial_entropy",
            &entropy,
            Box::new(polynomial(true, false)),
        ),
        step(
            "polynomial_at_ids",
            &at_ids,
            Box::new(polynomial(false, true)),
        ),
    ]
}

//! Against Hugging Face's values.

use drivetrain_core::{
    Result,
    batch::BatchTotals,
    engine::{Engine, ScoreRequest, StepOptions},
    model::ModelSpec,
    objective::Nll,
};

use crate::{
    compare::Bound,
    golden::{Golden, GoldenRun, MODELS},
    oracle::ReferenceBackend,
    suite::{Case, Findings, Layout, Needs, Subject},
    tolerance::{Tolerances, weights_after},
    train::{Training, gradients, tensors},
};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for name in MODELS {
        let needs = match Golden::model(name) {
            Ok(model) => Needs::model(&model),
            // The case then fails and says why.
            Err(_) => Needs::default(),
        };
        cases.push(Case::new(
            format!("golden/{name}/scores"),
            needs.clone(),
            move |s, f| scores(&Golden::read(name)?, s, f),
        ));
        let exports = Needs {
            export_gradients: true,
            ..needs.clone()
        };
        cases.push(Case::new(
            format!("golden/{name}/gradients"),
            exports,
            move |s, f| first_step(&Golden::read(name)?, s, f),
        ));
        for decay_1d in [false, true] {
            let rule = if decay_1d { "_decay_1d" } else { "" };
            cases.push(Case::new(
                format!("golden/{name}/three_steps{rule}"),
                needs.clone(),
                move |s, f| three_steps(&Golden::read(name)?, decay_1d, s, f),
            ));
        }
    }
    cases
}

fn scores(golden: &Golden, subject: &Subject, findings: &mut Findings) -> Result<()> {
    let tolerances = Tolerances::golden(&golden.model);
    let entropy = subject.backend.capability().entropy;
    let request = ScoreRequest {
        entropy,
        ..ScoreRequest::default()
    };
    let job = subject.job(&golden.model);
    let outputs = subject.run_from(&job, &golden.weights, |rank| {
        rank.engine.forward(&golden.batch, &request)
    })?;
    let bound = Bound::Uniform(tolerances.log_prob);
    let log_probs = &outputs[0].log_probs;
    findings.check("log_probs", "", log_probs, &golden.log_probs, bound);
    if entropy {
        let found = outputs[0].entropy.as_deref().unwrap_or_default();
        let bound = Bound::Uniform(tolerances.entropy);
        findings.check("entropy", "", found, &golden.entropy, bound);
    }
    Ok(())
}

fn first_step(golden: &Golden, subject: &Subject, findings: &mut Findings) -> Result<()> {
    let tolerances = Tolerances::golden(&golden.model);
    let totals = BatchTotals::count(&golden.batch);
    let job = subject.job(&golden.model);
    let objective = Nll::default();
    let results = subject.run_from(&job, &golden.weights, |rank| {
        let report = rank
            .engine
            .forward_backward(&golden.batch, &objective, &totals)?;
        let gradients = gradients(&mut rank.engine)?;
        let step = rank.engine.optim_step(&StepOptions::default())?;
        Ok((report.loss, gradients, step.grad_norm))
    })?;
    let (loss, gradients, grad_norm) = &results[0];
    let run = &golden.runs[0];
    findings.number("loss", "", *loss, run.losses[0], tolerances.log_prob);
    super::check_gradients(findings, &tolerances, gradients, &golden.gradients);
    let tolerance = tolerances.grad_norm(&golden.gradients);
    findings.number("grad_norm", "", *grad_norm, run.grad_norms[0], tolerance);
    Ok(())
}

fn three_steps(
    golden: &Golden,
    decay_1d: bool,
    subject: &Subject,
    findings: &mut Findings,
) -> Result<()> {
    let batches = vec![golden.batch.clone(); 3];
    let mut optimizer = golden.optimizer;
    optimizer.decay_1d = decay_1d;
    let objective = Nll::default();
    let training = Training {
        model: &golden.model,
        weights: &golden.weights,
        batches: &batches,
        objective: &objective,
        optimizer,
        layout: Layout::default(),
    };
    let found = training.run(subject, findings)?;
    let oracle = training.run(&subject.other(reference()), findings)?;
    let tolerances = Tolerances::golden(&golden.model);
    let parameters = golden.model.parameters();
    let start = tensors(&golden.weights);
    let bounds = weights_after(&parameters, &optimizer, &start, &oracle.steps, &tolerances);
    let run = golden.runs.iter().find(|r| r.decay_1d == decay_1d);
    let run = run.expect("both rules are read");
    check_run(
        findings,
        &tolerances,
        &golden.model,
        run,
        &found.losses,
        &found.grad_norms,
    );
    // Where Hugging Face's weights are not kept, the oracle's, which agree with those that are, stand for them.
    let expected = if run.weights.is_empty() {
        &oracle.weights
    } else {
        &run.weights
    };
    for (name, expected) in expected {
        let found = found.weights.get(name).map(Vec::as_slice);
        let bound = Bound::Each(&bounds[name]);
        findings.check("weights", name, found.unwrap_or_default(), expected, bound);
    }
    Ok(())
}

/// Losses and norms move with the weights: by their first-order change when each weight moves by the floor of
/// its tolerance, on top of their own rounding.
fn check_run(
    findings: &mut Findings,
    tolerances: &Tolerances,
    model: &ModelSpec,
    run: &GoldenRun,
    losses: &[f64],
    grad_norms: &[f64],
) {
    let drift = crate::tolerance::WEIGHT_FLOOR * (model.num_parameters() as f64).sqrt();
    for (n, (&found, &expected)) in losses.iter().zip(&run.losses).enumerate() {
        let moved = drift * n as f64 * run.grad_norms[n];
        let tolerance = tolerances.log_prob + moved;
        findings.number("loss", &format!("step {n}"), found, expected, tolerance);
        let (found, expected) = (grad_norms[n], run.grad_norms[n]);
        let tolerance = tolerances.log_prob * expected + moved;
        findings.number(
            "grad_norm",
            &format!("step {n}"),
            found,
            expected,
            tolerance,
        );
    }
}

fn reference() -> std::sync::Arc<dyn drivetrain_core::engine::Backend> {
    std::sync::Arc::new(ReferenceBackend::new())
}

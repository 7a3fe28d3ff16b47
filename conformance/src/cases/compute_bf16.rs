//! Activations, and the weights that they meet, in bf16 beside f32 masters: a step is as far from the oracle's as that
//! rounding makes it, and no further. Gradients are reduced in f32, or in bf16 where a job says so.
//!
//! No experts: what is rounded so may choose others, and then nothing can be compared.

use drivetrain_core::{
    DType, Result,
    config::OptimizerConfig,
    model::{Family, ModelSpec},
    objective::Nll,
};

use super::{
    check_gradients,
    large::LONG,
    layouts::unsplit,
    step::{Setting, oracle},
};
use crate::{
    compare::{Bound, largest},
    fixture::{batches, dense, model},
    objective::Watched,
    suite::{Case, Findings, Layout, Needs, Subject},
    tolerance::{Tolerances, weights_after},
    train::{Training, tensors},
};

const SHORT: DType = DType::Bf16;

const FIXTURES: [&str; 6] = ["dense", "tied", "bias", "q3", "window", "single_kv_head"];

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for name in FIXTURES {
        for (label, layout) in unsplit() {
            let layout = layout.sequences(2);
            let computed = layout.compute(SHORT);
            cases.push(case(
                "compute_bf16",
                name,
                label,
                computed,
                model(name),
                None,
            ));
            if layout.num_ranks() > 1 {
                let reduced = layout.reduce(SHORT);
                cases.push(case("reduce_bf16", name, label, reduced, model(name), None));
                let both = computed.reduce(SHORT);
                cases.push(case("both_bf16", name, label, both, model(name), None));
            }
        }
    }
    for (name, window) in [("long", None), ("long_window", Some(70))] {
        let mut model = dense(Family::Llama, 2);
        model.max_position_embeddings = 256;
        for layer in &mut model.layers {
            layer.sliding_window = window;
        }
        let layout = Layout::default().compute(SHORT);
        cases.push(case(
            "compute_bf16",
            name,
            "ranks1",
            layout,
            model,
            Some(&LONG),
        ));
    }
    cases
}

/// Of these sequences (tokens, of which scored), or eight short ones.
fn case(
    what: &str,
    name: &str,
    label: &str,
    layout: Layout,
    model: ModelSpec,
    sequences: Option<&'static [(usize, usize)]>,
) -> Case {
    let needs = Needs {
        layout,
        export_gradients: true,
        ..Needs::model(&model)
    };
    Case::new(
        format!("{what}/{name}/{label}"),
        needs,
        move |subject, findings| one_step(&model, layout, sequences, subject, findings),
    )
}

fn one_step(
    model: &ModelSpec,
    layout: Layout,
    sequences: Option<&'static [(usize, usize)]>,
    subject: &Subject,
    findings: &mut Findings,
) -> Result<()> {
    let seed = subject.settings.seed;
    let setting = Setting::new(model, seed)?;
    let batch = match sequences {
        Some(shape) => batches::scored(shape, model.vocab_size, seed)?,
        None => batches::eight(model.vocab_size, seed)?,
    };
    let nll = Nll::default();
    let watched = Watched::new(&nll);
    setting.step(&oracle(subject), &batch, &watched, Layout::default())?;
    let train = |subject: &Subject, layout, findings: &mut Findings| {
        let training = Training {
            model,
            weights: &setting.weights,
            batches: std::slice::from_ref(&batch),
            objective: &nll,
            optimizer: OptimizerConfig::default(),
            layout,
        };
        training.run(subject, findings)
    };
    let exact = train(&oracle(subject), Layout::default(), findings)?;
    let found = train(subject, layout, findings)?;
    let log_probs = exact.log_probs.as_deref().unwrap_or_default();
    let mut tolerances = match layout.compute {
        Some(dtype) => Tolerances::rounded(model, dtype, largest(log_probs)),
        None => setting.tolerances(subject, &batch, 1.0)?,
    };
    if let Some(dtype) = layout.reduce {
        tolerances = tolerances.reduced_in(dtype);
    }
    let bound = Bound::Uniform(tolerances.log_prob);
    let scores = found.log_probs.as_deref().unwrap_or_default();
    findings.check("log_probs", "", scores, log_probs, bound);
    let loss = tolerances.log_prob * watched.slopes().0;
    findings.number("loss", "", found.losses[0], exact.losses[0], loss);
    let gradients = &exact.steps[0].gradients;
    check_gradients(findings, &tolerances, &found.steps[0].gradients, gradients);
    let (norm, expected) = (found.grad_norms[0], exact.grad_norms[0]);
    let tolerance = tolerances.grad_norm(gradients);
    findings.number("grad_norm", "", norm, expected, tolerance);
    let start = tensors(&setting.weights);
    let parameters = model.parameters();
    let optimizer = OptimizerConfig::default();
    let bounds = weights_after(&parameters, &optimizer, &start, &exact.steps, &tolerances);
    for (name, expected) in &exact.weights {
        let found = found.weights.get(name).map(Vec::as_slice);
        let bound = Bound::Each(&bounds[name]);
        findings.check("weights", name, found.unwrap_or_default(), expected, bound);
    }
    let wide = Layout {
        compute: None,
        reduce: None,
        ..layout
    };
    let other = train(subject, wide, findings)?.steps[0].gradients != found.steps[0].gradients;
    findings.fact("gradients are others than without bf16", other);
    Ok(())
}

//! Activations that are kept for backward in bf16: forward is the same bits, and the gradient is off by what rounding
//! makes of it, and not to one side.

use drivetrain_core::{
    DType, Result,
    config::OptimizerConfig,
    model::{Family, ModelSpec},
    objective::Nll,
};

use super::{
    check_gradients,
    large::LONG,
    layouts::{meshes, unsplit},
    step::{Setting, oracle},
};
use crate::{
    fixture::{batches, dense, model},
    suite::{Case, Findings, Layout, Needs, Subject},
    tolerance::{Tensors, along},
    train::{Trace, Training},
};

const SAVED: DType = DType::Bf16;

const FIXTURES: [&str; 7] = ["dense", "tied", "bias", "q3", "window", "mixtral", "q3_moe"];

const LAYOUTS: [&str; 16] = [
    "ranks1",
    "recompute1",
    "recompute3_ranks2",
    "selective",
    "tp2",
    "tp2_sp",
    "tp2_sp_selective",
    "cp2",
    "pp2_chunks2",
    "pp2_dp2",
    "tp2_sp_cp2_pp2_chunks2",
    "ep2",
    "ep2_selective",
    "ep2_etp2",
    "ep2_tp2_sp",
    "ep4_cp2_tp2",
];

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for name in FIXTURES {
        for (label, layout) in layouts() {
            cases.push(case(name, label, layout.sequences(2), model(name), None));
        }
    }
    // Many tokens, over which rounding averages out.
    for (name, family) in [("long_llama", Family::Llama), ("long_qwen3", Family::Qwen3)] {
        let mut model = dense(family, 2);
        model.max_position_embeddings = 256;
        model.qk_norm = family == Family::Qwen3;
        let whole = Layout::default();
        cases.push(case(name, "ranks1", whole, model, Some(&LONG)));
    }
    cases
}

fn layouts() -> impl Iterator<Item = (&'static str, Layout)> {
    let all = unsplit().into_iter().chain(meshes());
    all.filter(|(label, _)| LAYOUTS.contains(label))
}

/// Of these sequences (tokens, of which scored), or eight short ones.
fn case(
    name: &str,
    label: &str,
    layout: Layout,
    model: ModelSpec,
    sequences: Option<&'static [(usize, usize)]>,
) -> Case {
    let needs = Needs {
        layout: layout.saved_activations(SAVED),
        export_gradients: true,
        ..Needs::model(&model)
    };
    let name = format!("saved_activations/{name}/{label}");
    Case::new(name, needs, move |subject, findings| {
        one_step(&model, layout, sequences, subject, findings)
    })
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
    let scored = batch.scored().into_iter().filter(|&s| s).count();
    let tolerances = setting
        .tolerances(subject, &batch, 1.0)?
        .saved_in(SAVED, model);
    let train = |subject: &Subject, layout, findings: &mut Findings| {
        let training = Training {
            model,
            weights: &setting.weights,
            batches: std::slice::from_ref(&batch),
            objective: &Nll::default(),
            optimizer: OptimizerConfig::default(),
            layout,
        };
        training.run(subject, findings)
    };
    let exact = train(&oracle(subject), Layout::default(), findings)?;
    tolerances.check_margin(&exact.metrics[0], findings);
    let whole = train(subject, layout, findings)?;
    let rounded = train(subject, layout.saved_activations(SAVED), findings)?;
    let forward = |t: &Trace| {
        let numbers = (t.log_probs.clone(), t.losses.clone());
        (numbers, t.metrics.clone(), t.expert_tokens.clone())
    };
    let same = forward(&whole) == forward(&rounded);
    findings.fact("what is kept for backward changes nothing forward", same);
    let (found, exact) = (&rounded.steps[0].gradients, &exact.steps[0].gradients);
    check_gradients(findings, &tolerances, found, exact);
    let share = dot(found, exact) / dot(exact, exact);
    let tolerance = along(SAVED, model, scored);
    findings.number("length along the gradient", "", share, 1.0, tolerance);
    Ok(())
}

fn dot(a: &Tensors, b: &Tensors) -> f64 {
    let of = |(name, b): (&String, &Vec<f64>)| -> f64 {
        let a = a.get(name).map(Vec::as_slice).unwrap_or_default();
        a.iter().zip(b).map(|(a, b)| a * b).sum()
    };
    b.iter().map(of).sum()
}

//! A mixture of experts in training: the router's losses, its selection bias, frozen and f64 routers, over every axis
//! that is claimed; experts that get all tokens, few, or none.

use drivetrain_core::{
    DType, Result,
    batch::{Batch, BatchBuilder, BatchTotals},
    config::{LoadBalancing, MoeConfig, OptimizerConfig, ParallelConfig},
    engine::{Engine, ScoreRequest, StepOptions},
    model::{ModelSpec, ParameterKind},
    moe::{LOAD_BALANCING_LOSS, ROUTER_Z_LOSS},
    objective::Nll,
    plan::MicrobatchLimit,
    weights::MemoryWeights,
};

use super::{five_steps::FiveSteps, step::Setting};
use crate::{
    compare::Bound,
    fixture::{batches, model, weights},
    suite::{Case, Findings, Layout, Needs, Subject},
    train::{Trace, Training, gradients},
};

const MODELS: [&str; 2] = ["mixtral", "q3_moe"];

/// Each sequence balanced by itself, and a z-loss.
pub(super) fn sequence() -> MoeConfig {
    MoeConfig {
        load_balancing: Some(LoadBalancing::Sequence),
        load_balancing_coefficient: Some(0.1),
        z_loss_coefficient: 0.01,
        ..MoeConfig::default()
    }
}

/// Micro-batches balanced over all ranks.
fn global() -> MoeConfig {
    MoeConfig {
        load_balancing: Some(LoadBalancing::Global),
        load_balancing_coefficient: Some(0.1),
        ..MoeConfig::default()
    }
}

/// A selection bias that moves far enough to change choices: further than any two softmax values are apart.
pub(super) fn bias() -> MoeConfig {
    MoeConfig {
        bias_update_rate: 1.0,
        ..MoeConfig::default()
    }
}

fn frozen() -> MoeConfig {
    MoeConfig {
        frozen_router: true,
        ..sequence()
    }
}

fn router_f64() -> MoeConfig {
    MoeConfig {
        router_dtype: DType::F64,
        ..sequence()
    }
}

/// Ranks that share experts in every way, by name.
fn layouts() -> Vec<(&'static str, Layout)> {
    let of = |data, tensor, expert, expert_tensor| {
        Layout::parallel(ParallelConfig {
            data_parallel_size: data,
            tensor_parallel_size: tensor,
            expert_parallel_size: expert,
            expert_tensor_parallel_size: expert_tensor,
            ..ParallelConfig::default()
        })
    };
    let with = |change: fn(&mut Layout), mut layout: Layout| {
        change(&mut layout);
        layout
    };
    vec![
        ("ranks1", of(1, 1, 1, None)),
        ("ranks2", of(2, 1, 1, None)),
        (
            "replicas2",
            with(|l| l.parallel.data_replicate_size = 2, of(2, 1, 1, None)),
        ),
        ("recompute2", with(|l| l.full_layers = 2, of(1, 1, 1, None))),
        ("tensor2", of(1, 2, 1, None)),
        (
            "tensor2_sequence",
            with(|l| l.parallel.sequence_parallel = true, of(1, 2, 1, None)),
        ),
        (
            "context2",
            with(|l| l.parallel.context_parallel_size = 2, of(1, 1, 1, None)),
        ),
        (
            "pipeline2",
            with(|l| l.parallel.pipeline_parallel_size = 2, of(1, 1, 1, None)),
        ),
        ("data2_expert2", of(2, 1, 2, None)),
        ("tensor2_expert2", of(1, 2, 2, None)),
        ("data2_tensor2_expert2", of(2, 2, 2, Some(2))),
        (
            "data2_tensor2_sequence_expert2",
            with(|l| l.parallel.sequence_parallel = true, of(2, 2, 2, None)),
        ),
        ("data4_expert4", of(4, 1, 4, None)),
    ]
}

type Run = fn(&str, Layout, &Subject, &mut Findings) -> Result<()>;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |what: String, name: &'static str, moe, layout: Layout, run: Run| {
        let needs = Needs {
            layout,
            moe,
            ..Needs::model(&model(name))
        };
        cases.push(Case::new(format!("experts/{what}"), needs, move |s, f| {
            run(name, layout, s, f)
        }));
    };
    for (label, layout) in layouts() {
        let few = matches!(label, "ranks1" | "ranks2");
        for name in MODELS {
            let each = layout.sequences(1);
            let mut five = |what: &str, moe, layout| {
                add(
                    format!("{name}/{what}/{label}"),
                    name,
                    moe,
                    layout,
                    five_steps,
                );
            };
            five("sequence", sequence(), layout);
            five("sequence_micro1", sequence(), each);
            five("global", global(), layout);
            five("bias", bias(), each);
            if few {
                five("frozen", frozen(), each);
                five("router_f64", router_f64(), layout);
            }
        }
        let mut one = |what: &str, moe, layout, run| {
            add(format!("{what}/{label}"), "mixtral", moe, layout, run);
        };
        one("few_scored", sequence(), layout.sequences(1), few_scored);
        one("idle", sequence(), layout, idle);
        one("uneven", MoeConfig::default(), layout, uneven);
        if few {
            let two = layout.sequences(2);
            one("global_is_of_the_cut", global(), two, of_the_cut);
            one("one_expert_has_all", sequence(), layout, one_has_all);
            one("one_expert_has_all_global", global(), layout, one_has_all);
            one("losses_stand_beside", sequence(), layout, beside);
        }
    }
    cases
}

fn five_steps(
    name: &str,
    layout: Layout,
    subject: &Subject,
    findings: &mut Findings,
) -> Result<()> {
    let five = FiveSteps::of(name, subject)?;
    let found = five.train(subject, layout, findings)?;
    five.check(&found, findings);
    Ok(())
}

/// Few scored tokens, and a sequence with none: the router's losses are divided by what the whole batch has, however
/// it is cut.
fn few_scored(
    name: &str,
    layout: Layout,
    subject: &Subject,
    findings: &mut Findings,
) -> Result<()> {
    let model = model(name);
    let setting = Setting::new(&model, subject.settings.seed)?;
    let shape = [(9, 1), (4, 0), (6, 2), (3, 1)];
    let batch = batches::scored(&shape, model.vocab_size, subject.settings.seed)?;
    setting.check_step(subject, findings, &batch, &Nll::default(), layout)
}

/// Micro-batches of two sequences, cut alike by the oracle.
fn of_the_cut(
    name: &str,
    layout: Layout,
    subject: &Subject,
    findings: &mut Findings,
) -> Result<()> {
    let model = model(name);
    let setting = Setting::new(&model, subject.settings.seed)?;
    let batch = batches::eight(model.vocab_size, subject.settings.seed)?;
    let nll = Nll::default();
    let pair = (layout, layout);
    setting.check_step_beside(subject, findings, &batch, &nll, pair)
}

/// The losses change gradients and not the reported loss.
fn beside(name: &str, layout: Layout, subject: &Subject, findings: &mut Findings) -> Result<()> {
    let model = model(name);
    let setting = Setting::new(&model, subject.settings.seed)?;
    let batch = batches::eight(model.vocab_size, subject.settings.seed)?;
    let step = |subject: &Subject| setting.step(subject, &batch, &Nll::default(), layout);
    let (with, without) = (
        step(subject)?,
        step(&subject.with_moe(MoeConfig::default()))?,
    );
    findings.check("loss", "", &[with.loss], &[without.loss], Bound::Exact);
    let named = |name| with.metrics.value(name).is_some() && without.metrics.value(name).is_none();
    let reported = named(LOAD_BALANCING_LOSS) && named(ROUTER_Z_LOSS);
    findings.fact("the losses are metrics where the job has them", reported);
    let moved = with.grad_norm != without.grad_norm;
    findings.fact("the losses have a gradient", moved);
    Ok(())
}

/// A fixture whose tokens choose by their id: the first dim of the residual stream is +8 for even ids and -8 for odd
/// ones, far above what layers add, and it is nearly all that routers look at. Even ids go to experts 0 and then 1,
/// odd ids to 3 and then 2.
fn steered(model: &ModelSpec, seed: u64) -> Result<MemoryWeights> {
    let drawn = weights(model, seed)?;
    let mut steered = drawn.clone();
    for spec in model.parameters() {
        let Some(values) = drawn.values(&spec.name) else {
            continue;
        };
        let (mut values, d) = (values.to_vec(), model.hidden_size);
        match spec.kind {
            ParameterKind::Embedding => {
                for (id, row) in values.chunks_exact_mut(d).enumerate() {
                    row[0] = if id % 2 == 0 { 8.0 } else { -8.0 };
                }
            }
            ParameterKind::Router => {
                for (row, pull) in values.chunks_exact_mut(d).zip([12.0, 4.0, -4.0, -12.0]) {
                    row.iter_mut()
                        .for_each(|w| *w = f64::from((*w / 8.0) as f32));
                    row[0] = pull;
                }
            }
            _ => continue,
        }
        steered.insert(&spec.name, &spec.shape, spec.dtype, values)?;
    }
    Ok(steered)
}

/// Sequences of even ids (`true`) or odd ones, all scored.
fn by_parity(lengths: &[(usize, bool)], vocab_size: usize, seed: u64) -> Result<Batch> {
    let lengths_only: Vec<_> = lengths.iter().map(|&(n, _)| (n, n - 1)).collect();
    let drawn = batches::scored(&lengths_only, vocab_size, seed)?;
    let mut builder = BatchBuilder::new();
    for (s, &(_, even)) in lengths.iter().enumerate() {
        let ids = drawn.tokens()[drawn.sequence(s)].iter();
        // Below the vocabulary's odd size either way.
        let parity = |&id: &u32| (id / 2 * 2).min(vocab_size as u32 - 3) + u32::from(!even);
        builder.push(&ids.map(parity).collect::<Vec<_>>(), None)?;
    }
    builder.build()
}

/// Top-1 of four experts, all tokens strongly to expert 0: the load-balancing loss is 4, and not the 1.9 of a softmax
/// of the softmax.
fn one_has_all(
    name: &str,
    layout: Layout,
    subject: &Subject,
    findings: &mut Findings,
) -> Result<()> {
    let mut model = model(name);
    if let Some(moe) = &mut model.moe {
        moe.experts_per_token = 1;
    }
    let setting = Setting {
        weights: steered(&model, subject.settings.seed)?,
        model: &model,
    };
    let shape = [(5, true), (9, true), (3, true), (6, true)];
    let batch = by_parity(&shape, model.vocab_size, subject.settings.seed)?;
    let nll = Nll::default();
    let found = setting.step(subject, &batch, &nll, layout)?;
    let loss = found.metrics.value(LOAD_BALANCING_LOSS);
    findings.number(
        "load_balancing_loss",
        "",
        loss.unwrap_or(f64::NAN),
        4.0,
        0.01,
    );
    let all = |layer: &Vec<u64>| layer[..] == [batch.num_tokens() as u64, 0, 0, 0];
    findings.fact(
        "expert 0 has every token",
        found.expert_tokens.iter().all(all),
    );
    setting.check_step(subject, findings, &batch, &nll, layout)
}

/// A step in which every expert has tokens, then one in which two have none: their gradients are zeros (not what was
/// there before), and all others the oracle's.
fn idle(name: &str, layout: Layout, subject: &Subject, findings: &mut Findings) -> Result<()> {
    let model = model(name);
    let weights = steered(&model, subject.settings.seed)?;
    let vocab = model.vocab_size;
    let mixed = [(5, true), (4, false), (7, false), (6, true)];
    let even = [(5, true), (9, true), (3, true), (6, true)];
    let batches = [
        by_parity(&mixed, vocab, subject.settings.seed)?,
        by_parity(&even, vocab, subject.settings.seed)?,
    ];
    let train = |subject: &Subject, layout, findings: &mut Findings| -> Result<Trace> {
        let training = Training {
            model: &model,
            weights: &weights,
            batches: &batches,
            objective: &Nll::default(),
            // Both steps are of the first weights, so that rounding of the first is not in the second.
            optimizer: OptimizerConfig {
                learning_rate: 0.0,
                ..OptimizerConfig::default()
            },
            layout,
        };
        training.run(subject, findings)
    };
    let found = train(subject, layout, findings)?;
    let exact = train(&super::step::oracle(subject), Layout::default(), findings)?;
    let same = found.expert_tokens == exact.expert_tokens;
    findings.fact("every expert got as many tokens as the oracle's", same);
    let none = |layer: &Vec<u64>| layer[2..] == [0, 0] && layer[0] > 0;
    let idle = found
        .expert_tokens
        .last()
        .is_some_and(|l| l.iter().all(none));
    findings.fact("experts 2 and 3 have no token in the second step", idle);
    let setting = Setting {
        weights: weights.clone(),
        model: &model,
    };
    let tolerances = setting.tolerances(subject, &batches[1], 1.0)?;
    for metrics in &exact.metrics {
        tolerances.check_margin(metrics, findings);
    }
    if let (Some(found), Some(exact)) = (found.steps.last(), exact.steps.last())
        && !found.gradients.is_empty()
    {
        let idle = model.parameters().into_iter();
        for spec in idle.filter(|spec| spec.expert.is_some_and(|e| e >= 2)) {
            let zeros = vec![0.0; spec.num_elements()];
            let found = found.gradients.get(&spec.name).map(Vec::as_slice);
            let bound = Bound::Uniform(0.0);
            findings.check(
                "idle gradient",
                &spec.name,
                found.unwrap_or_default(),
                &zeros,
                bound,
            );
        }
        super::check_gradients(findings, &tolerances, &found.gradients, &exact.gradients);
    }
    Ok(())
}

/// 7 tokens for two experts and 13 for the other two.
fn uneven(name: &str, layout: Layout, subject: &Subject, findings: &mut Findings) -> Result<()> {
    let model = model(name);
    let setting = Setting {
        weights: steered(&model, subject.settings.seed)?,
        model: &model,
    };
    let shape = [(3, true), (9, false), (4, true), (4, false)];
    let batch = by_parity(&shape, model.vocab_size, subject.settings.seed)?;
    setting.check_step(subject, findings, &batch, &Nll::default(), layout)?;
    let mut job = subject.job(&model);
    layout.lay_out(&mut job);
    let ranks = subject.run_from(&job, &setting.weights, |rank| {
        let share = rank.share(&batch, MicrobatchLimit::All)?;
        let scores = rank.engine.forward(&share, &ScoreRequest::default())?;
        Ok((rank.data_index, scores.log_probs))
    })?;
    let mut found = Vec::new();
    for (index, log_probs) in &ranks {
        // Model-parallel peers score the same share.
        if *index == found.len() {
            found.push(log_probs.clone());
        }
    }
    let exact = setting.score(
        &super::step::oracle(subject),
        &batch,
        &ScoreRequest::default(),
    )?;
    let tolerance = setting.tolerances(subject, &batch, 1.0)?.log_prob;
    let bound = Bound::Uniform(tolerance);
    findings.check("log_probs", "", &found.concat(), &exact.log_probs, bound);
    Ok(())
}

/// An aborted step and a skipped one leave the selection bias; a committed one moves it.
pub(super) fn bias_waits(layout: Layout, subject: &Subject, findings: &mut Findings) -> Result<()> {
    let model = model("mixtral");
    let setting = Setting::new(&model, subject.settings.seed)?;
    let batch = batches::eight(model.vocab_size, subject.settings.seed)?;
    let totals = BatchTotals::count(&batch);
    let mut job = subject.job(&model);
    layout.lay_out(&mut job);
    // Weights stay, so that only the bias can change a score.
    let still = StepOptions {
        learning_rate: Some(0.0),
        ..StepOptions::default()
    };
    let all = subject.run_from(&job, &setting.weights, |rank| {
        let share = rank.share(&batch, MicrobatchLimit::All)?;
        let nll = Nll::default();
        let score = |engine: &mut dyn Engine| engine.forward(&share, &ScoreRequest::default());
        let first = score(&mut rank.engine)?;
        rank.engine.forward_backward(&share, &nll, &totals)?;
        rank.engine.abort()?;
        rank.engine.zero_grad()?;
        let aborted = score(&mut rank.engine)?;
        let mut moved = false;
        for _ in 0..8 {
            rank.engine.forward_backward(&share, &nll, &totals)?;
            gradients(&mut rank.engine)?;
            rank.engine.optim_step(&still)?;
            moved |= score(&mut rank.engine)? != first;
        }
        Ok((first == aborted, moved))
    })?;
    let aborted = all.iter().all(|(same, _)| *same);
    findings.fact("an aborted step leaves the bias", aborted);
    findings.fact(
        "committed steps move it",
        all.iter().any(|(_, moved)| *moved),
    );
    Ok(())
}

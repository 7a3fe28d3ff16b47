//! N18 of the known failures, and its kind: scratch that nobody has written is read nowhere.
//!
//! In this build every buffer that a workspace lends is NaN all over (`Workspace::take`), one that was used before as
//! well as a new one; so whatever is read before it is written, or kept from a micro-batch or step before, ends in a
//! gradient that is not finite.

use drivetrain_conformance::{
    fixture::{batches, model, weights},
    suite::{Layout, Subject},
    tolerance::Tensors,
    train,
};
use drivetrain_core::{
    DType,
    batch::{Batch, BatchTotals},
    config::{LoadBalancing, MoeConfig, ParallelConfig, RecomputeModule},
    engine::{Engine, ScoreRequest, StepOptions},
    model::{ModelSpec, ParameterKind},
    objective::Nll,
    weights::{MemoryWeights, WeightSource},
};

use crate::{Megatron, workspace::Workspace};

const MOE: MoeConfig = MoeConfig {
    load_balancing: Some(LoadBalancing::Sequence),
    load_balancing_coefficient: Some(0.1),
    z_loss_coefficient: 0.01,
    bias_update_rate: 0.0,
    frozen_router: false,
    router_dtype: DType::F32,
};

/// Gradients of the second of two steps, finite; the weights stay.
fn gradients(model: &ModelSpec, start: &MemoryWeights, batch: &Batch, layout: Layout) -> Tensors {
    let moe = if model.moe.is_some() {
        MOE
    } else {
        MoeConfig::default()
    };
    let subject = Subject::new(Megatron).with_moe(moe);
    let mut job = subject.job(model);
    job.config.optimizer.learning_rate = 0.0;
    layout.lay_out(&mut job);
    let totals = BatchTotals::count(batch);
    let ranks = subject.run_from(&job, start, |rank| {
        let share = rank.share(batch, layout.limit)?;
        let engine = &mut rank.engine;
        engine.forward_backward(&share, &Nll::default(), &totals)?;
        let step = engine.optim_step(&StepOptions::default())?;
        assert!(step.grad_norm.is_finite() && !step.skipped, "{layout:?}");
        let scores = engine.forward(&share, &ScoreRequest::default())?;
        assert!(scores.log_probs.iter().all(|l| l.is_finite()), "{layout:?}");
        engine.forward_backward(&share, &Nll::default(), &totals)?;
        train::gradients(engine)
    });
    ranks.unwrap().remove(0)
}

fn assert_same(what: &str, found: &Tensors, expected: &Tensors) {
    assert_eq!(found.len(), expected.len());
    for (name, expected) in expected {
        let largest = expected.iter().fold(0.0_f64, |m, v| m.max(v.abs()));
        for (found, expected) in found[name].iter().zip(expected) {
            // A NaN is not within anything.
            let same = (found - expected).abs() <= 1e-5 * largest;
            assert!(same, "{what}: {name} is {found}, expected {expected}");
        }
    }
}

fn parallel(change: impl FnOnce(&mut ParallelConfig)) -> Layout {
    let mut parallel = ParallelConfig::default();
    change(&mut parallel);
    Layout::parallel(parallel)
}

/// All tokens go to experts 0 and 1: one dim of the residual stream is nearly all that routers see.
fn steered(model: &ModelSpec, start: &MemoryWeights) -> MemoryWeights {
    let (mut steered, d) = (start.clone(), model.hidden_size);
    for spec in model.parameters() {
        let mut values = start.read_f64(&spec.name).unwrap();
        match spec.kind {
            ParameterKind::Embedding => values.chunks_exact_mut(d).for_each(|row| row[0] = 8.0),
            ParameterKind::Router => {
                for (row, pull) in values.chunks_exact_mut(d).zip([12.0, 6.0, -6.0, -12.0]) {
                    row[0] = pull;
                }
            }
            _ => continue,
        }
        let dtype = spec.dtype;
        steered
            .insert(&spec.name, &spec.shape, dtype, values)
            .unwrap();
    }
    steered
}

#[test]
fn buffers_are_lent_poisoned() {
    let workspace = Workspace::new(drivetrain_kernels::Cpu::new(1).into());
    let mut first = workspace.take(8);
    assert!(first.iter().all(|v| v.is_nan()));
    first.fill(1.0);
    drop(first);
    assert!(workspace.take(8).iter().all(|v| v.is_nan()));
    assert!(workspace.zeros(8).iter().all(|&v| v == 0.0));
}

/// N18. EP2, scratch of NaN, two experts without a token: gradients are finite and those of EP1.
#[test]
fn expert_ranks_read_no_scratch_that_they_have_not_written() {
    let mut model = model("mixtral");
    model.layers.truncate(2);
    let start = steered(&model, &weights(&model, 7).unwrap());
    let batch = batches::eight(model.vocab_size, 7).unwrap();
    let one = gradients(&model, &start, &batch, Layout::default());
    let idle = |spec: &drivetrain_core::model::ParameterSpec| spec.expert.is_some_and(|e| e > 1);
    for spec in model.parameters().into_iter().filter(idle) {
        assert!(one[&spec.name].iter().all(|&g| g == 0.0), "{}", spec.name);
    }
    for (data, tensor, expert, expert_tensor) in [
        (2, 1, 2, 1),
        (1, 2, 2, 1),
        (2, 2, 2, 2),
        (4, 1, 4, 1),
        (2, 1, 1, 2),
    ] {
        let layout = parallel(|p| {
            p.data_parallel_size = data;
            p.tensor_parallel_size = tensor;
            p.expert_parallel_size = expert;
            p.expert_tensor_parallel_size = Some(expert_tensor);
        });
        for layout in [layout, layout.sequences(1)] {
            let found = gradients(&model, &start, &batch, layout);
            assert_same(&format!("{layout:?}"), &found, &one);
        }
    }
}

/// The same of every axis, of chunks of logits, and of what is computed again.
#[test]
fn no_axis_reads_scratch_that_it_has_not_written() {
    const MODULES: &[RecomputeModule] = &[
        RecomputeModule::AttentionCore,
        RecomputeModule::Norm,
        RecomputeModule::MlpActivation,
        RecomputeModule::MoeActivation,
    ];
    let mesh = |data, context, tensor, stages| {
        parallel(|p| {
            p.data_parallel_size = data;
            p.context_parallel_size = context;
            p.tensor_parallel_size = tensor;
            p.sequence_parallel = tensor > 1;
            p.pipeline_parallel_size = stages;
        })
    };
    let interleaved = parallel(|p| {
        p.pipeline_parallel_size = 2;
        p.virtual_pipeline_size = 2;
    });
    for name in ["dense", "tied", "bias", "q3", "window", "q3_moe"] {
        let model = model(name);
        let start = weights(&model, 7).unwrap();
        let batch = batches::eight(model.vocab_size, 7).unwrap();
        let one = gradients(&model, &start, &batch, Layout::default());
        // The last is of experts.
        let modules = &MODULES[..3 + usize::from(model.moe.is_some())];
        let again = |layout: Layout| Layout { modules, ..layout };
        for layout in [
            again(mesh(1, 1, 1, 1)),
            Layout {
                full_layers: 2,
                ..mesh(1, 1, 1, 1)
            },
            mesh(1, 1, 2, 1),
            again(mesh(1, 2, 2, 1)),
            mesh(1, 4, 1, 1).sequences(1),
            mesh(2, 1, 2, 2).sequences(2),
            interleaved.sequences(1),
        ] {
            let p = layout.parallel;
            let chunks = p.pipeline_parallel_size * p.virtual_pipeline_size;
            if !model.num_layers().is_multiple_of(chunks) {
                continue;
            }
            let found = gradients(&model, &start, &batch, layout);
            assert_same(&format!("{name} {layout:?}"), &found, &one);
        }
        // Rounded, they are within other bounds than those of layouts: here it counts that each is a number.
        for layout in [mesh(1, 1, 1, 1), again(mesh(1, 2, 2, 1))] {
            gradients(
                &model,
                &start,
                &batch,
                layout.saved_activations(DType::Bf16),
            );
        }
    }
}

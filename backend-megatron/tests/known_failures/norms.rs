//! The gradient's norm counts each weight once, whoever holds it; and what ranks hold alike they learn alike.

use drivetrain_conformance::{
    fixture::{batches, dense, model},
    suite::{Layout, Subject},
};
use drivetrain_core::{
    DType, ErrorKind,
    batch::BatchBuilder,
    config::{LoadBalancing, MoeConfig},
    engine::Backend,
    model::{Family, ParameterKind},
    objective::Nll,
};
use drivetrain_megatron::Megatron;

use super::{Linear, SEED, Setting, assert_all_close, assert_near, layout, squares, tensor};

const SHAPE: [(usize, usize); 4] = [(3, 1), (7, 4), (12, 9), (5, 0)];
const FINAL_NORM: &str = "model.norm.weight";
const HEAD: &str = "lm_head.weight";
const EMBEDDING: &str = "model.embed_tokens.weight";

/// The larger x for which `a x + b + c / x = total`.
fn root(a: f64, b: f64, c: f64, total: f64) -> f64 {
    let half = (total - b) / (2.0 * a);
    half + (half * half - c / a).sqrt()
}

/// N06 (a). TP2: squares of sharded gradients 16 in all, of replicated ones 9: norm 5, not 5.83.
#[test]
fn replicated_gradients_count_once_in_the_norm() {
    let mut setting = Setting::new(&dense(Family::Llama, 0), &SHAPE);
    let plain = setting.first(Layout::default()).gradients;
    let of = |name: &str| squares(&plain[name]);
    // A norm k times larger before a head k times smaller changes no logit: the head's gradient grows k times, the
    // norm's shrinks k times, the embedding's stays. (h k^2 + e) / (n / k^2) = 16 / 9.
    let (h, e, n) = (of(HEAD), of(EMBEDDING), of(FINAL_NORM));
    let k = ((-e + (e * e + 4.0 * h * n * 16.0 / 9.0).sqrt()) / (2.0 * h)).sqrt();
    setting.change(FINAL_NORM, |_, w| w * k);
    setting.change(HEAD, |_, w| w / k);
    setting.objective = Box::new(Linear::scaled(3.0 * k / n.sqrt()));
    for layout in [tensor(2, false), tensor(2, true), tensor(4, true)] {
        let found = setting.first(layout);
        let replicated = squares(&found.gradients[FINAL_NORM]);
        assert_near("replicated", replicated, 9.0, 1e-4);
        assert_near("norm", found.step.grad_norm, 5.0, 1e-5);
        // max_grad_norm is 1.
        assert_near("clip", found.step.clip_factor, 0.2, 1e-6);
    }
}

/// N06 (b). Tied embedding on both ends of PP2, squares of its gradient 800 in all: 28.284, not 40.
#[test]
fn a_tied_embedding_on_two_stages_counts_once_in_the_norm() {
    let mut tied = dense(Family::Llama, 2);
    tied.tied_embeddings = true;
    let mut setting = Setting::new(&tied, &SHAPE);
    // Layers that do nothing have no gradient; a large norm before the head has next to none.
    for spec in tied.parameters() {
        if spec.layer.is_some() && spec.shape.len() == 2 {
            setting.change(&spec.name, |_, _| 0.0);
        }
    }
    setting.change(FINAL_NORM, |_, w| 16.0 * w);
    let shared = squares(&setting.first(Layout::default()).gradients[EMBEDDING]);
    setting.objective = Box::new(Linear::scaled((800.0 / shared).sqrt()));
    for stages in [1, 2] {
        let found = setting.first(layout(|p| p.pipeline_parallel_size = stages));
        let others: f64 = found
            .gradients
            .iter()
            .filter(|(name, _)| *name != EMBEDDING)
            .map(|(_, g)| squares(g))
            .sum();
        let norm = found.step.grad_norm;
        assert_near("shared", (norm * norm - others).sqrt(), 28.284_271, 1e-3);
        assert!(others < 40.0, "{others} is not small beside 800");
        let exported = squares(&found.gradients[EMBEDDING]).sqrt();
        assert_near("exported", exported, 28.284_271, 1e-3);
    }
}

/// N07. Four experts whose gradients have norm 1, the rest together too, EP2 x TP2: the square root of 5.
#[test]
fn gradients_of_experts_are_in_the_norm() {
    let mut experts = model("mixtral");
    experts.layers.truncate(1);
    let shape: Vec<_> = (0..8).map(|n| (5 + n, 4 + n)).collect();
    let mut setting = Setting::new(&experts, &shape);
    let plain = setting.first(Layout::default()).gradients;
    let parameters = experts.parameters();
    // Squares of the gradients of expert e by matrix; those of the rest.
    let expert = |e: usize, matrix: &str| {
        let end = format!(".experts.{e}.{matrix}.weight");
        let (name, values) = plain.iter().find(|(n, _)| n.ends_with(&end)).unwrap();
        (name.clone(), squares(values))
    };
    let (head, norm) = (squares(&plain[HEAD]), squares(&plain[FINAL_NORM]));
    let dense: f64 = parameters
        .iter()
        .filter(|p| p.expert.is_none())
        .map(|p| squares(&plain[&p.name]))
        .sum();
    let totals = (0..4).map(|e| ["w1", "w2", "w3"].map(|m| expert(e, m).1).iter().sum());
    let most = totals.fold(dense, f64::max) * 1.1;
    // Up k times larger before down k times smaller changes no output: down's gradient grows k times, up's shrinks;
    // likewise the final norm and the head. So all five can have the same norm.
    for e in 0..4 {
        let [(_, gate), (down, d), (up, u)] = ["w1", "w2", "w3"].map(|m| expert(e, m));
        let k = root(d, gate, u, most).sqrt();
        setting.change(&up, |_, w| w * k);
        setting.change(&down, |_, w| w / k);
    }
    let k = root(head, dense - head - norm, norm, most).sqrt();
    setting.change(FINAL_NORM, |_, w| w * k);
    setting.change(HEAD, |_, w| w / k);
    setting.objective = Box::new(Linear::scaled(1.0 / most.sqrt()));
    let ranks = |data, sequence, expert_tensor| {
        layout(|p| {
            p.data_parallel_size = data;
            p.tensor_parallel_size = 2;
            p.sequence_parallel = sequence;
            p.expert_parallel_size = 2;
            p.expert_tensor_parallel_size = Some(expert_tensor);
        })
    };
    for layout in [ranks(1, false, 1), ranks(2, false, 2), ranks(2, true, 1)] {
        let found = setting.first(layout);
        for e in 0..4 {
            let own = parameters.iter().filter(|p| p.expert == Some(e));
            let sum: f64 = own.map(|p| squares(&found.gradients[&p.name])).sum();
            assert_near("expert", sum, 1.0, 1e-4);
        }
        assert_near("norm", found.step.grad_norm, 5.0_f64.sqrt(), 1e-4);
    }
}

/// N09. TP2 with sequence parallelism, 12 tokens: gradients of norms, biases and routers are those of one rank, on
/// both ranks.
#[test]
fn what_tensor_ranks_hold_alike_has_the_whole_gradient() {
    for name in ["dense", "bias", "q3_moe"] {
        let mut model = model(name);
        model.layers.truncate(2);
        let mut setting = Setting::new(&model, &[(5, 3), (7, 5)]);
        assert_eq!(setting.batch.num_tokens(), 12);
        setting.objective = Box::new(Nll::default());
        if model.moe.is_some() {
            setting.moe = MoeConfig {
                load_balancing: Some(LoadBalancing::Sequence),
                load_balancing_coefficient: Some(0.1),
                z_loss_coefficient: 0.01,
                ..MoeConfig::default()
            };
        }
        let one = setting.first(Layout::default());
        let ranks = setting.run(tensor(2, true));
        assert_eq!(ranks[0].gradients, ranks[1].gradients);
        assert_eq!(ranks[0].weights, ranks[1].weights);
        let alike = model.parameters().into_iter().filter(|p| {
            p.shape.len() == 1 || p.kind == ParameterKind::Router || p.kind == ParameterKind::Norm
        });
        let mut checked = 0;
        for spec in alike {
            let (found, expected) = (&ranks[0].gradients[&spec.name], &one.gradients[&spec.name]);
            // A shard's gradient alone would be off by about as much as the gradient is large.
            assert!(squares(expected).sqrt() > 1e-3, "{}", spec.name);
            for (found, expected) in found.iter().zip(expected) {
                assert_near(&spec.name, *found, *expected, 1e-6);
            }
            checked += 1;
        }
        assert!(checked >= 5, "{name}: {checked}");
    }
}

/// N30. Partial gradients of a norm weight, 256 on one rank and 1 on the other: 257, where bf16 would give 256. f32 is
/// what is claimed, and all else is refused.
#[test]
fn partial_gradients_are_summed_in_f32() {
    let plain = dense(Family::Llama, 0);
    let d = plain.hidden_size;
    let mut setting = Setting::new(&plain, &[(2, 1)]);
    setting.change(FINAL_NORM, |_, _| 1.0);
    setting.change(EMBEDDING, |i, w| match i / d {
        1 => f64::from(u8::from(i % d == 0)),
        _ => w,
    });
    let mut builder = BatchBuilder::new();
    for target in [2, 3] {
        builder.push(&[1, target], None).unwrap();
    }
    setting.batch = builder.build().unwrap();
    // Sequences lie on one rank each; only dim 0 of the norm has a gradient, in proportion to a sequence's weight.
    let weigh = |setting: &mut Setting, weights: [f64; 2]| {
        let mut by_id = vec![0.0; plain.vocab_size];
        by_id[2..4].copy_from_slice(&weights);
        setting.objective = Box::new(Linear { scale: 1.0, by_id });
    };
    let mut unit = |weights| {
        weigh(&mut setting, weights);
        setting.first(Layout::default()).gradients[FINAL_NORM][0]
    };
    let units = [unit([1.0, 0.0]), unit([0.0, 1.0])];
    weigh(&mut setting, [256.0 / units[0], 1.0 / units[1]]);
    let data = layout(|p| p.data_parallel_size = 2);
    let context = layout(|p| p.context_parallel_size = 2);
    for layout in [tensor(2, true), tensor(2, false), data, context] {
        let found = setting.first(layout).gradients;
        assert_near("sum", found[FINAL_NORM][0], 257.0, 1e-3);
    }
    assert_eq!(Megatron.capability().reduce, [DType::F32]);
    let mut job = setting.job(data);
    job.config.precision.reduce = DType::Bf16;
    let refused = Subject::new(Megatron).run_from(&job, &setting.weights, |_| Ok(()));
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Unsupported);
}

/// N04 beside it: the same batch of 8 has the same gradient and norm whatever ranks share it.
#[test]
fn the_norm_does_not_depend_on_the_ranks() {
    let mut setting = Setting::new(&model("tied"), &SHAPE);
    setting.batch = batches::eight(setting.model.vocab_size, SEED).unwrap();
    let one = setting.first(Layout::default());
    let ranks = |data, tensor, context, stages| {
        layout(|p| {
            p.data_parallel_size = data;
            p.tensor_parallel_size = tensor;
            p.context_parallel_size = context;
            p.pipeline_parallel_size = stages;
        })
    };
    for layout in [
        ranks(2, 1, 1, 1),
        ranks(4, 1, 1, 1),
        ranks(2, 2, 2, 1),
        ranks(2, 1, 2, 2),
    ] {
        let found = setting.first(layout);
        let (norm, expected) = (found.step.grad_norm, one.step.grad_norm);
        assert_near("norm", norm, expected, 1e-5 * expected);
        assert_all_close("gradient", &found.gradients, &one.gradients, 1e-5);
    }
}

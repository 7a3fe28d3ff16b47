//! The head over a split vocabulary.

use drivetrain_conformance::{
    fixture::{dense, model},
    suite::Layout,
};
use drivetrain_core::{
    batch::BatchBuilder,
    model::Family,
    objective::{Nll, Objective},
};

use super::{Linear, Setting, assert_close, assert_near, joined, layout, tensor};

/// Targets on either side of every cut of 97 words over 2 or 4 ranks.
const TARGETS: [u32; 8] = [3, 47, 48, 49, 23, 96, 0, 73];

/// N12. The gradient of the logits is softmax minus one-hot on every shard, the target's or not.
#[test]
fn every_shard_of_the_vocabulary_has_the_right_gradient() {
    let mut plain = dense(Family::Llama, 0);
    plain.rms_norm_eps = 1e-6;
    let (d, vocab) = (plain.hidden_size, plain.vocab_size);
    let mut setting = Setting::new(&plain, &[(2, 1)]);
    // Id i is embedded as unit vector i, so that column i of the head's gradient is that of the logits after i.
    setting.change("model.embed_tokens.weight", |i, _| {
        f64::from(u8::from(i / d == i % d))
    });
    setting.change("model.norm.weight", |_, _| 1.0);
    let mut builder = BatchBuilder::new();
    for (id, target) in TARGETS.into_iter().enumerate() {
        builder.push(&[id as u32, target], None).unwrap();
    }
    setting.batch = builder.build().unwrap();
    let hidden = 1.0 / (1.0 / d as f64 + plain.rms_norm_eps).sqrt();
    let weight = setting.weights.values("lm_head.weight").unwrap().to_vec();
    let tokens = TARGETS.len() as f64;
    let objectives: [(Box<dyn Objective>, f64); 2] = [
        (Box::new(Linear::scaled(1.0)), 1.0),
        (Box::new(Nll::default()), tokens),
    ];
    for (objective, divisor) in objectives {
        setting.objective = objective;
        for layout in [
            tensor(1, false),
            tensor(2, false),
            tensor(2, true),
            tensor(4, true),
        ] {
            let gradient = &setting.first(layout).gradients["lm_head.weight"];
            for (i, &target) in TARGETS.iter().enumerate() {
                let logits: Vec<_> = (0..vocab).map(|v| hidden * weight[v * d + i]).collect();
                let sum: f64 = logits.iter().map(|l| l.exp()).sum();
                for (v, logit) in logits.iter().enumerate() {
                    let one_hot = f64::from(u8::from(v == target as usize));
                    let found = gradient[v * d + i] * divisor / hidden;
                    let what = format!("d logit {v} after {i}");
                    assert_near(&what, found, logit.exp() / sum - one_hot, 1e-6);
                }
            }
        }
    }
}

/// N14. The loss of split logits is that of whole ones, on every rank: neither ln 2 nor anything else is added.
#[test]
fn the_loss_does_not_depend_on_the_tensor_ranks() {
    for name in ["dense", "tied"] {
        let mut setting = Setting::new(&model(name), &[(3, 1), (7, 4), (12, 9), (5, 0)]);
        setting.objective = Box::new(Nll::default());
        let one = setting.first(Layout::default());
        let staged = layout(|p| {
            p.tensor_parallel_size = 2;
            p.pipeline_parallel_size = 2;
        });
        for layout in [tensor(2, false), tensor(2, true), tensor(4, true), staged] {
            let ranks = setting.run(layout);
            for found in &ranks {
                assert_eq!(found.loss, ranks[0].loss);
                assert_near("gap", found.loss - one.loss, 0.0, 1e-6 * one.loss);
                assert_close("log-probs", &found.log_probs, &one.log_probs, 1e-6);
            }
            assert_close("joined", &joined(&ranks), &one.log_probs, 1e-6);
        }
    }
}

//! Experts: what trains the router, and ranks or experts that get more tokens than others, or none.

use drivetrain_conformance::{fixture::model, suite::Layout};
use drivetrain_core::{
    config::{LoadBalancing, MoeConfig},
    model::{ModelSpec, ParameterKind},
    moe::LOAD_BALANCING_LOSS,
    objective::Nll,
};

use super::{Found, Setting, assert_all_close, assert_close, assert_near, joined, layout, tensor};

fn balanced(load_balancing: LoadBalancing) -> MoeConfig {
    MoeConfig {
        load_balancing: Some(load_balancing),
        load_balancing_coefficient: Some(0.1),
        ..MoeConfig::default()
    }
}

/// Four experts, of which each token goes to one, in two layers.
fn top_1() -> ModelSpec {
    let mut model = model("mixtral");
    model.layers.truncate(2);
    if let Some(moe) = &mut model.moe {
        moe.experts_per_token = 1;
    }
    model
}

/// Every token goes to expert 0: one dim of the residual stream is far above what layers add, and routers look at
/// little else.
fn steer(setting: &mut Setting) {
    let d = setting.model.hidden_size;
    for spec in setting.model.parameters() {
        match spec.kind {
            ParameterKind::Embedding => {
                setting.change(&spec.name, |i, w| if i % d == 0 { 8.0 } else { w });
            }
            ParameterKind::Router => setting.change(&spec.name, |i, w| match (i / d, i % d) {
                (0, 0) => 12.0,
                (_, 0) => -4.0,
                _ => w / 8.0,
            }),
            _ => {}
        }
    }
}

/// Ranks that share data and experts in several ways.
fn expert_layouts() -> Vec<Layout> {
    let ranks = |data, tensor, expert, expert_tensor| {
        layout(|p| {
            p.data_parallel_size = data;
            p.tensor_parallel_size = tensor;
            p.expert_parallel_size = expert;
            p.expert_tensor_parallel_size = Some(expert_tensor);
        })
    };
    vec![
        ranks(2, 1, 1, 1),
        ranks(2, 1, 2, 1),
        ranks(1, 2, 2, 1),
        ranks(2, 2, 2, 2),
        ranks(4, 1, 4, 1),
    ]
}

fn routers(found: &Found) -> Vec<(&String, &Vec<f64>)> {
    let named = |name: &str| name.ends_with(".gate.weight");
    let all = found.gradients.iter();
    all.filter(|(name, _)| named(name)).collect()
}

/// N16. Top-1 of four experts, all tokens strongly to expert 0: the load-balancing loss is 4, not the 1.90 of a softmax
/// taken twice.
#[test]
fn the_softmax_of_the_load_balancing_loss_is_taken_once() {
    for form in [LoadBalancing::Sequence, LoadBalancing::Global] {
        let mut setting = Setting::new(&top_1(), &[(5, 4), (9, 8), (3, 2), (6, 5)]);
        steer(&mut setting);
        setting.moe = balanced(form);
        for layout in [vec![Layout::default()], expert_layouts()].concat() {
            let found = setting.first(layout);
            let loss = found.metrics.value(LOAD_BALANCING_LOSS).unwrap();
            assert_near("loss", loss, 4.0, 0.01);
            let tokens = setting.batch.num_tokens() as u64;
            assert!(found.expert_tokens.iter().all(|l| *l == [tokens, 0, 0, 0]));
        }
    }
}

/// N17. Few scored tokens: the router's gradient does not depend on tensor or context ranks, nor on micro-batches.
#[test]
fn router_losses_do_not_depend_on_how_the_work_is_cut() {
    for name in ["mixtral", "q3_moe"] {
        let mut model = model(name);
        model.layers.truncate(2);
        let mut setting = Setting::new(&model, &[(9, 1), (4, 0), (6, 2), (3, 1)]);
        setting.objective = Box::new(Nll::default());
        setting.moe = MoeConfig {
            z_loss_coefficient: 0.01,
            ..balanced(LoadBalancing::Sequence)
        };
        let one = setting.first(Layout::default());
        assert!(
            routers(&one)
                .iter()
                .all(|(_, g)| g.iter().any(|&g| g != 0.0))
        );
        let context = layout(|p| p.context_parallel_size = 2);
        let both = layout(|p| {
            p.tensor_parallel_size = 2;
            p.sequence_parallel = true;
            p.context_parallel_size = 2;
        });
        for layout in [
            tensor(2, false),
            tensor(2, true),
            context,
            both,
            Layout::default().sequences(1),
            Layout::default().sequences(2),
            both.sequences(1),
        ] {
            let found = setting.first(layout);
            for (name, expected) in routers(&one) {
                assert_close(name, &found.gradients[name], expected, 1e-5);
            }
        }
    }
}

/// R05. All tokens go to expert 0: the step ends, the idle experts' gradients are zeros and all others one rank's.
#[test]
fn experts_without_tokens_have_gradients_of_zero() {
    let mut setting = Setting::new(&top_1(), &[(5, 4), (9, 8), (3, 2), (6, 5)]);
    steer(&mut setting);
    setting.objective = Box::new(Nll::default());
    let one = setting.first(Layout::default());
    for layout in expert_layouts() {
        for layout in [layout, layout.sequences(1)] {
            let found = setting.first(layout);
            assert_all_close("gradient", &found.gradients, &one.gradients, 1e-5);
            for spec in setting.model.parameters() {
                let zero = found.gradients[&spec.name].iter().all(|&g| g == 0.0);
                if let Some(expert) = spec.expert {
                    assert_eq!(expert > 0, zero, "{}", spec.name);
                }
            }
        }
    }
}

/// R06. EP2 whose ranks have 7 and 13 tokens: scores are those of EP1.
#[test]
fn expert_ranks_may_have_unequal_numbers_of_tokens() {
    for name in ["mixtral", "q3_moe"] {
        for shape in [[(7, 6), (13, 12)], [(1, 0), (13, 12)]] {
            let setting = Setting::new(&model(name), &shape);
            let one = setting.first(Layout::default());
            let two = layout(|p| {
                p.data_parallel_size = 2;
                p.expert_parallel_size = 2;
            });
            let ranks = setting.run(two);
            assert_close("log-probs", &joined(&ranks), &one.log_probs, 1e-5);
            let found = &ranks[0].gradients;
            assert_all_close("gradient", found, &one.gradients, 1e-5);
        }
    }
}

//! A mixture of experts: what the job's router is trained by, and whether the backend does it.

use super::{Facts, Faults, Rule};
use crate::{
    DType,
    config::{LoadBalancing, MoeConfig},
    engine::Moe,
    moe::RouterLosses,
};

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "MOE-01",
        what: "a training of experts that the backend does not offer",
        reads: &["backend", "moe"],
        check: claims,
    },
    Rule {
        id: "MOE-02",
        what: "a setting of experts for a model without them",
        reads: &["moe"],
        check: |facts, faults| {
            let given = facts.config.moe != MoeConfig::default();
            if given && facts.model.is_some_and(|m| m.moe.is_none()) {
                faults.error(
                    "moe",
                    "given, but the model has no experts",
                    "remove the section, or choose a model with experts",
                );
            }
        },
    },
    Rule {
        id: "MOE-03",
        what: "a setting of experts outside its range",
        reads: &["moe"],
        check: |facts, faults| {
            let moe = &facts.config.moe;
            for (path, value) in [
                (COEFFICIENT, moe.load_balancing_coefficient.unwrap_or(0.0)),
                (Z_LOSS, moe.z_loss_coefficient),
                (BIAS, moe.bias_update_rate),
            ] {
                if !(value.is_finite() && value >= 0.0) {
                    faults.error(path, format!("{value}"), "write 0 or more");
                }
            }
            if !matches!(moe.router_dtype, DType::F32 | DType::F64) {
                let found = format!("a router in {}", moe.router_dtype);
                faults.error(ROUTER_DTYPE, found, "write `f32` or `f64`");
            }
        },
    },
    Rule {
        id: "MOE-04",
        what: "a form of load-balancing loss without a weight",
        reads: &["moe"],
        check: |facts, faults| {
            let Some(moe) = facts.model.and_then(|m| m.moe) else {
                return;
            };
            let own = facts.config.moe.load_balancing_coefficient;
            let coefficient = own.unwrap_or(moe.aux_loss_coefficient);
            if facts.config.moe.load_balancing.is_some() && coefficient == 0.0 {
                faults.error(
                    FORM,
                    "given, but the loss has no weight",
                    format!("set {COEFFICIENT}, or remove it"),
                );
            }
        },
    },
];

const FORM: &str = "moe.load_balancing";
const COEFFICIENT: &str = "moe.load_balancing_coefficient";
const Z_LOSS: &str = "moe.z_loss_coefficient";
const BIAS: &str = "moe.bias_update_rate";
const FROZEN: &str = "moe.frozen_router";
const ROUTER_DTYPE: &str = "moe.router_dtype";

/// A wish: whether the job has it, the key that says it, in words, what to write instead, and who grants it.
type Wish<'a> = (bool, &'static str, &'a str, &'static str, fn(&Moe) -> bool);

fn claims(facts: &Facts<'_>, faults: &mut Faults) {
    let (Some(model), moe) = (facts.model, &facts.config.moe) else {
        return;
    };
    if model.moe.is_none() {
        return;
    }
    let losses = RouterLosses::new(facts.config, model);
    let balances = |form| losses.balancing == Some(form);
    let coefficient = losses.balancing_coefficient;
    let sequence = format!("the load-balancing loss of sequences (coefficient {coefficient})");
    let global = format!("the load-balancing loss of micro-batches (coefficient {coefficient})");
    let wishes: [Wish<'_>; 6] = [
        (
            balances(LoadBalancing::Sequence),
            COEFFICIENT,
            &sequence,
            "write 0 to train without it",
            |m| m.sequence_balancing,
        ),
        (
            balances(LoadBalancing::Global),
            COEFFICIENT,
            &global,
            "write 0 to train without it",
            |m| m.global_balancing,
        ),
        (
            losses.z_coefficient != 0.0,
            Z_LOSS,
            "the router's z-loss",
            "write 0",
            |m| m.z_loss,
        ),
        (
            moe.bias_update_rate != 0.0,
            BIAS,
            "a selection bias of experts",
            "write 0",
            |m| m.expert_bias,
        ),
        (
            moe.frozen_router,
            FROZEN,
            "a frozen router",
            "write `false`",
            |m| m.frozen_router,
        ),
        (
            moe.router_dtype == DType::F64,
            ROUTER_DTYPE,
            "a router in f64",
            "write `f32`",
            |m| m.router_f64,
        ),
    ];
    for (wanted, path, what, otherwise, granted) in wishes {
        if wanted {
            facts.require(faults, path, what, otherwise, |c| {
                c.moe.as_ref().is_some_and(granted)
            });
        }
    }
}

//! The loss: settings in range, none that its kind would ignore, and outputs that the backend offers.

use super::{Facts, Faults, Rule};
use crate::config::{
    LossAggregation, ObjectiveConfig,
    ObjectiveKind::{self, Cispo, Dapo, Dpo, Grpo, Gspo, Nll, Ppo},
};
use crate::objective::{Setting, settings};

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "OBJ-01",
        what: "a temperature that is not above 0, or not in the range of f32",
        reads: &["objective.temperature"],
        check: |facts, faults| {
            let temperature = facts.config.objective.temperature;
            if !crate::engine::is_temperature(temperature) {
                faults.error(
                    "objective.temperature",
                    format!("temperature is {temperature}: logits are divided by it"),
                    "give a number above 0, in the range of f32; 1.0 leaves the logits as they are",
                );
            }
        },
    },
    Rule {
        id: "OBJ-02",
        what: "a setting that the kind of objective does not use",
        reads: &["objective"],
        check: unused,
    },
    Rule {
        id: "OBJ-03",
        what: "a divisor without `aggregation: constant`, or the reverse",
        reads: &["objective"],
        check: |facts, faults| {
            let o = &facts.config.objective;
            let constant = o.aggregation == Some(LossAggregation::Constant);
            match o.divisor {
                None if constant => faults.error(
                    "objective.aggregation",
                    "`constant` without a divisor",
                    "add `divisor:` (what the summed loss is divided by), or write `token_mean`",
                ),
                Some(_) if !constant => faults.error(
                    "objective.divisor",
                    "a divisor, but aggregation is not `constant`",
                    "remove it, or write `aggregation: constant`",
                ),
                Some(divisor) if divisor <= 0.0 => faults.error(
                    "objective.divisor",
                    format!("divisor is {divisor}"),
                    "give a number above 0",
                ),
                _ => {}
            }
        },
    },
    Rule {
        id: "OBJ-04",
        what: "a setting of the objective outside its range",
        reads: &["objective"],
        check: ranges,
    },
    Rule {
        id: "OBJ-05",
        what: "an estimator of a KL term that has no weight",
        reads: &["objective"],
        check: |facts, faults| {
            let o = &facts.config.objective;
            if o.kl_estimator.is_some() && o.kl_coefficient == 0.0 {
                faults.error(
                    "objective.kl_estimator",
                    "given, but kl_coefficient is 0",
                    "add `kl_coefficient:` (such as 0.01), or remove it",
                );
            }
        },
    },
    Rule {
        id: "OBJ-06",
        what: "an objective that needs what the backend does not offer",
        reads: &["objective"],
        check: |facts, faults| {
            let o = &facts.config.objective;
            if o.entropy_coefficient != 0.0 {
                facts.require(
                    faults,
                    "objective.entropy_coefficient",
                    "entropy",
                    "write 0",
                    |c| c.entropy,
                );
            }
            let (path, wants_reference) = match o.kind {
                Dpo => ("objective.kind", true),
                _ => ("objective.kl_coefficient", o.kl_coefficient != 0.0),
            };
            if wants_reference {
                let what = "snapshots of weights, which a reference policy needs";
                facts.require(
                    faults,
                    path,
                    what,
                    "choose an objective without a reference",
                    |c| c.snapshots,
                );
            }
        },
    },
];

/// Keys that only some kinds use, and those kinds.
const USED_BY: [(&str, &[ObjectiveKind]); 9] = [
    ("aggregation", &[Nll, Ppo, Grpo, Dapo, Gspo, Cispo]),
    ("clip_low", &[Ppo, Grpo, Dapo, Gspo, Cispo]),
    ("clip_high", &[Ppo, Grpo, Dapo, Gspo, Cispo]),
    ("dual_clip", &[Ppo, Grpo, Dapo]),
    ("kl_coefficient", &[Ppo, Grpo, Dapo, Gspo, Cispo]),
    ("kl_estimator", &[Ppo, Grpo, Dapo, Gspo, Cispo]),
    ("entropy_coefficient", &[Nll, Ppo, Grpo, Dapo, Gspo, Cispo]),
    ("beta", &[Dpo]),
    ("label_smoothing", &[Dpo]),
];

fn unused(facts: &Facts<'_>, faults: &mut Faults) {
    let kind = facts.config.objective.kind;
    // Plain data with string keys: serialising cannot fail.
    let json = |o: &ObjectiveConfig| serde_json::to_value(o).unwrap_or_default();
    let (given, default) = (
        json(&facts.config.objective),
        json(&ObjectiveConfig::default()),
    );
    for (key, kinds) in USED_BY {
        if given[key] != default[key] && !kinds.contains(&kind) {
            let users: Vec<_> = kinds.iter().map(|k| name(*k)).collect();
            faults.error(
                &format!("objective.{key}"),
                format!("the objective `{}` does not use {key}", name(kind)),
                format!(
                    "remove it, or choose a kind that does: {}",
                    users.join(", ")
                ),
            );
        }
    }
}

/// Temperature and divisor have rules of their own.
fn ranges(facts: &Facts<'_>, faults: &mut Faults) {
    let of_this_rule = |s: &Setting| !s.sound && !["temperature", "divisor"].contains(&s.key);
    for setting in settings(&facts.config.objective).filter(of_this_rule) {
        faults.error(
            &format!("objective.{}", setting.key),
            format!("{} is {}", setting.key, setting.value),
            format!("give a number {}", setting.range),
        );
    }
}

fn name(kind: ObjectiveKind) -> &'static str {
    match kind {
        Nll => "nll",
        Ppo => "ppo",
        Grpo => "grpo",
        Dapo => "dapo",
        Gspo => "gspo",
        Cispo => "cispo",
        Dpo => "dpo",
    }
}

//! AdamW's settings and the learning rate over the steps.

use super::Rule;
use crate::config::ScheduleKind;

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "OPT-01",
        what: "an optimizer setting outside its range",
        reads: &[],
        check: |facts, faults| {
            let o = &facts.config.optimizer;
            let at_least_0 = |x: f64| x >= 0.0 && x.is_finite();
            let checks = [
                (
                    "learning_rate",
                    o.learning_rate,
                    at_least_0(o.learning_rate),
                    "0 or above",
                ),
                (
                    "beta1",
                    o.beta1,
                    (0.0..1.0).contains(&o.beta1),
                    "in [0, 1), such as 0.9",
                ),
                (
                    "beta2",
                    o.beta2,
                    (0.0..1.0).contains(&o.beta2),
                    "in [0, 1), such as 0.95",
                ),
                (
                    "epsilon",
                    o.epsilon,
                    o.epsilon > 0.0,
                    "above 0, such as 1e-8",
                ),
                (
                    "weight_decay",
                    o.weight_decay,
                    at_least_0(o.weight_decay),
                    "0 or above",
                ),
            ];
            for (key, value, good, range) in checks {
                if !good {
                    let found = format!("{key} is {value}");
                    faults.error(
                        &format!("optimizer.{key}"),
                        found,
                        format!("give a number {range}"),
                    );
                }
            }
        },
    },
    Rule {
        id: "OPT-02",
        what: "a bound on the gradient's norm that is not above 0",
        reads: &["optimizer.max_grad_norm"],
        check: |facts, faults| {
            if let Some(norm) = facts.config.optimizer.max_grad_norm
                && norm <= 0.0
            {
                faults.error(
                    "optimizer.max_grad_norm",
                    format!("max_grad_norm is {norm}: every gradient would be clipped to nothing"),
                    "give a number above 0, or `null` for no clipping",
                );
            }
        },
    },
    Rule {
        id: "OPT-03",
        what: "a learning rate far above any that AdamW bears (warning)",
        reads: &["optimizer.learning_rate"],
        check: |facts, faults| {
            let rate = facts.config.optimizer.learning_rate;
            if rate >= 0.5 {
                faults.warning(
                    "optimizer.learning_rate",
                    format!("{rate}: AdamW moves each weight by about this much a step"),
                    "rates from 1e-6 to 1e-2 are usual",
                );
            }
        },
    },
    Rule {
        id: "LR-01",
        what: "warmup and decay longer than the run",
        reads: &["schedule", "steps"],
        check: |facts, faults| {
            let (s, steps) = (&facts.config.schedule, facts.config.steps);
            if s.warmup_steps > steps {
                faults.error(
                    "schedule.warmup_steps",
                    format!(
                        "{} steps of warmup, but the run has {steps}",
                        s.warmup_steps
                    ),
                    format!("write {steps} or less"),
                );
            } else if s.warmup_steps.saturating_add(s.decay_steps) > steps {
                faults.error(
                    "schedule.decay_steps",
                    format!(
                        "warmup_steps {} + decay_steps {} is more than the run's {steps} steps",
                        s.warmup_steps, s.decay_steps
                    ),
                    format!("write {} or less", steps - s.warmup_steps),
                );
            }
        },
    },
    Rule {
        id: "LR-02",
        what: "a last learning rate that is not a part of the peak",
        reads: &["schedule.min_ratio"],
        check: |facts, faults| {
            let ratio = facts.config.schedule.min_ratio;
            if !(0.0..=1.0).contains(&ratio) {
                faults.error(
                    "schedule.min_ratio",
                    format!("min_ratio is {ratio}"),
                    "give a number from 0 to 1: a part of optimizer.learning_rate",
                );
            }
        },
    },
    Rule {
        id: "LR-03",
        what: "a schedule key that its kind does not use, or one it lacks",
        reads: &["schedule"],
        check: |facts, faults| {
            let s = &facts.config.schedule;
            let wsd = s.kind == ScheduleKind::WarmupStableDecay;
            if !wsd && s.decay_steps > 0 {
                faults.error(
                    "schedule.decay_steps",
                    "only `warmup_stable_decay` uses decay_steps",
                    "remove it, or write `kind: warmup_stable_decay`",
                );
            }
            if wsd && s.decay_steps == 0 {
                faults.error(
                    "schedule.kind",
                    "`warmup_stable_decay` without decay_steps never decays",
                    "add `decay_steps:` (steps of decay at the end), or write `kind: constant`",
                );
            }
            if s.kind == ScheduleKind::Constant && s.min_ratio != 0.0 {
                faults.error(
                    "schedule.min_ratio",
                    "the kind `constant` does not use min_ratio",
                    "remove it, or write `kind: cosine` or `kind: linear`",
                );
            }
        },
    },
];

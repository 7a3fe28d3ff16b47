//! Expert parallelism: the expert view of the mesh, and the model's experts over it.

use super::{
    Rule,
    parallel::{divisors, list},
};

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "EP-02",
        what: "expert parallelism for a model without experts",
        reads: &[
            "parallel.expert_parallel_size",
            "parallel.expert_tensor_parallel_size",
        ],
        check: |facts, faults| {
            let p = &facts.config.parallel;
            if facts.model.is_none_or(|m| m.moe.is_some()) {
                return;
            }
            if p.expert_parallel_size > 1 {
                faults.error(
                    "parallel.expert_parallel_size",
                    format!(
                        "{} expert ranks, but the model has no experts",
                        p.expert_parallel_size
                    ),
                    "set it to 1",
                );
            }
            if p.expert_tensor_parallel_size.is_some_and(|n| n > 1) {
                faults.error(
                    "parallel.expert_tensor_parallel_size",
                    "given, but the model has no experts",
                    "remove it",
                );
            }
        },
    },
    Rule {
        id: "EP-03",
        what: "experts that the expert ranks do not divide",
        reads: &["parallel.expert_parallel_size"],
        check: |facts, faults| {
            let Some(moe) = facts.model.and_then(|m| m.moe) else {
                return;
            };
            let ranks = facts.config.parallel.expert_parallel_size;
            if !moe.num_experts.is_multiple_of(ranks) {
                faults.error(
                    "parallel.expert_parallel_size",
                    format!(
                        "{ranks} expert ranks do not divide the model's {} experts",
                        moe.num_experts
                    ),
                    format!("choose one of {}", list(divisors(moe.num_experts))),
                );
            }
        },
    },
    Rule {
        id: "EP-04",
        what: "expert and expert-tensor ranks that do not divide a stage's ranks",
        reads: &["parallel"],
        check: |facts, faults| {
            let p = &facts.config.parallel;
            let stage = p.data_parallel_size * p.context_parallel_size * p.tensor_parallel_size;
            let tensor = p.expert_tensor_size();
            let experts = p.expert_parallel_size.saturating_mul(tensor);
            if (p.expert_parallel_size > 1 || p.expert_tensor_parallel_size.is_some())
                && !stage.is_multiple_of(experts)
            {
                faults.error(
                    "parallel.expert_parallel_size",
                    format!(
                        "expert_parallel_size {} x expert_tensor_parallel_size {tensor} = {experts} does not divide a stage's ranks: data_parallel_size {} x context_parallel_size {} x tensor_parallel_size {} = {stage}",
                        p.expert_parallel_size,
                        p.data_parallel_size,
                        p.context_parallel_size,
                        p.tensor_parallel_size
                    ),
                    format!("make the product one of {}", list(divisors(stage))),
                );
            }
        },
    },
    Rule {
        id: "EP-05",
        what: "an expert's width that the expert-tensor ranks do not divide",
        reads: &["parallel"],
        check: |facts, faults| {
            let Some(moe) = facts.model.and_then(|m| m.moe) else {
                return;
            };
            let tensor = facts.config.parallel.expert_tensor_size();
            if !moe.ffn_size.is_multiple_of(tensor) {
                faults.error(
                    "parallel.expert_tensor_parallel_size",
                    format!(
                        "{tensor} expert-tensor ranks do not divide the experts' width {}",
                        moe.ffn_size
                    ),
                    "choose a divisor of the width, such as 1",
                );
            }
        },
    },
];

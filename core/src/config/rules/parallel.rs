//! How ranks are arranged, and whether the model divides so.

use super::{Facts, Faults, Rule};
use crate::{config::ParallelConfig, model::MlpSpec, plan};

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "MESH-01",
        what: "the product of the sizes is not the world size",
        reads: &["parallel"],
        check: world_size,
    },
    Rule {
        id: "DP-02",
        what: "replicas that do not divide the data-parallel ranks",
        reads: &[
            "parallel.data_parallel_size",
            "parallel.data_replicate_size",
        ],
        check: |facts, faults| {
            let p = &facts.config.parallel;
            let (data, replicas) = (p.data_parallel_size, p.data_replicate_size);
            if !data.is_multiple_of(replicas) {
                faults.error(
                    "parallel.data_replicate_size",
                    format!("{replicas} replicas do not divide data_parallel_size {data}"),
                    format!("choose one of {}", list(divisors(data))),
                );
            }
        },
    },
    Rule {
        id: "TP-02",
        what: "query heads that the tensor ranks do not divide",
        reads: &["parallel.tensor_parallel_size"],
        check: |facts, faults| {
            let Some(model) = facts.model else { return };
            let (tensor, heads) = (facts.config.parallel.tensor_parallel_size, model.num_heads);
            if !heads.is_multiple_of(tensor) {
                faults.error(
                    TENSOR,
                    format!("{tensor} tensor ranks do not divide the model's {heads} query heads"),
                    format!("choose one of {}", list(divisors(heads))),
                );
            }
        },
    },
    Rule {
        id: "TP-03",
        what: "key/value heads that neither divide the tensor ranks nor are divided by them",
        reads: &["parallel.tensor_parallel_size"],
        check: |facts, faults| {
            let Some(model) = facts.model else { return };
            let tensor = facts.config.parallel.tensor_parallel_size;
            let (heads, kv) = (model.num_heads, model.num_kv_heads);
            if !kv.is_multiple_of(tensor) && !tensor.is_multiple_of(kv) {
                let works = |t: &usize| kv.is_multiple_of(*t) || t.is_multiple_of(kv);
                faults.error(
                    TENSOR,
                    format!("{tensor} tensor ranks neither divide the model's {kv} key/value heads nor are a multiple of them"),
                    format!("choose one of {}", list(divisors(heads).into_iter().filter(works))),
                );
            } else if tensor > kv {
                let what = format!("{kv} key/value heads replicated over {tensor} tensor ranks");
                let otherwise = format!("set {TENSOR} to {kv} or a divisor of it");
                facts.require(faults, TENSOR, &what, &otherwise, |c| {
                    c.tensor_parallel.is_none_or(|t| t.replicated_kv_heads)
                });
            }
        },
    },
    Rule {
        id: "TP-04",
        what: "a feed-forward width that the tensor ranks do not divide",
        reads: &["parallel.tensor_parallel_size"],
        check: |facts, faults| {
            let Some(model) = facts.model else { return };
            let tensor = facts.config.parallel.tensor_parallel_size;
            let widths = model.layers.iter().filter_map(|layer| match layer.mlp {
                MlpSpec::Dense { ffn_size } => Some(ffn_size),
                MlpSpec::Moe => None,
            });
            if let Some(width) = widths.into_iter().find(|w| !w.is_multiple_of(tensor)) {
                let good = |t: &usize| width.is_multiple_of(*t);
                faults.error(
                    TENSOR,
                    format!("{tensor} tensor ranks do not divide the feed-forward width {width}"),
                    format!(
                        "choose one of {}",
                        list(divisors(model.num_heads).into_iter().filter(good))
                    ),
                );
            }
        },
    },
    Rule {
        id: "TP-05",
        what: "sequence parallelism without tensor ranks (warning)",
        reads: &[
            "parallel.sequence_parallel",
            "parallel.tensor_parallel_size",
        ],
        check: |facts, faults| {
            let p = &facts.config.parallel;
            if p.sequence_parallel && p.tensor_parallel_size == 1 {
                faults.warning(
                    "parallel.sequence_parallel",
                    "sequence_parallel with one tensor rank splits nothing",
                    "remove it, or raise parallel.tensor_parallel_size",
                );
            }
        },
    },
    Rule {
        id: "PP-02",
        what: "layers that the stages do not divide",
        reads: &["parallel"],
        check: stages,
    },
    Rule {
        id: "PP-03",
        what: "layers of the first or last stage without stages",
        reads: &["parallel"],
        check: |facts, faults| {
            let p = &facts.config.parallel;
            let ends = [
                ("parallel.first_stage_layers", p.first_stage_layers),
                ("parallel.last_stage_layers", p.last_stage_layers),
            ];
            for (path, layers) in ends {
                if layers.is_some() && p.pipeline_parallel_size == 1 {
                    faults.error(
                        path,
                        "given, but pipeline_parallel_size is 1",
                        "remove it, or raise parallel.pipeline_parallel_size",
                    );
                }
            }
        },
    },
    Rule {
        id: "PP-04",
        what: "model chunks without stages",
        reads: &[
            "parallel.virtual_pipeline_size",
            "parallel.pipeline_parallel_size",
        ],
        check: |facts, faults| {
            let p = &facts.config.parallel;
            if p.virtual_pipeline_size > 1 && p.pipeline_parallel_size == 1 {
                faults.error(
                    "parallel.virtual_pipeline_size",
                    format!(
                        "{} chunks a stage, but pipeline_parallel_size is 1",
                        p.virtual_pipeline_size
                    ),
                    "set it to 1, or raise parallel.pipeline_parallel_size",
                );
            }
        },
    },
];

const TENSOR: &str = "parallel.tensor_parallel_size";

fn world_size(facts: &Facts<'_>, faults: &mut Faults) {
    let p = &facts.config.parallel;
    let Some(world) = p.world_size else { return };
    let axes = [
        ("pipeline_parallel_size", p.pipeline_parallel_size),
        ("data_parallel_size", p.data_parallel_size),
        ("context_parallel_size", p.context_parallel_size),
        ("tensor_parallel_size", p.tensor_parallel_size),
    ];
    let product: usize = axes.iter().map(|(_, size)| size).product();
    if product == world {
        return;
    }
    let factors: Vec<_> = axes
        .iter()
        .map(|(name, size)| format!("{name} {size}"))
        .collect();
    let experts = match p.expert_parallel_size {
        1 => String::new(),
        n => format!(
            "; expert_parallel_size {n} lies within data x context x tensor and is no factor"
        ),
    };
    let mut choices = vec![format!("world_size: {product}")];
    for (name, size) in axes {
        let others = product / size;
        if world.is_multiple_of(others) && world / others != size {
            choices.push(format!("{name}: {}", world / others));
        }
    }
    faults.error(
        "parallel.world_size",
        format!(
            "{} = {product} ranks, but world_size is {world}{experts}",
            factors.join(" x ")
        ),
        format!("set one of {}", choices.join("; ")),
    );
}

fn stages(facts: &Facts<'_>, faults: &mut Faults) {
    let (Some(model), p) = (facts.model, &facts.config.parallel) else {
        return;
    };
    let layers = model.num_layers();
    if p.pipeline_parallel_size == 1 || plan::stages(layers, p).is_ok() {
        return;
    }
    let (stages, chunks) = (p.pipeline_parallel_size, p.virtual_pipeline_size);
    let ends = [p.first_stage_layers, p.last_stage_layers];
    let given = ends
        .iter()
        .flatten()
        .fold(0, |sum, n| n.saturating_add(sum));
    let shape = match ends.iter().flatten().count() {
        0 => format!("{layers} layers over {stages} stages of {chunks} chunk(s)"),
        ends => format!(
            "{layers} layers, {given} of them on the stages given, over {} stages of {chunks} chunk(s)",
            stages - ends
        ),
    };
    faults.error(
        "parallel.pipeline_parallel_size",
        format!("{shape}: not a whole number of layers, above 0, for each"),
        stage_choices(p, layers),
    );
}

fn stage_choices(p: &ParallelConfig, layers: usize) -> String {
    let chunks = p.virtual_pipeline_size;
    let good: Vec<_> = divisors(layers)
        .into_iter()
        .filter(|n| layers.is_multiple_of(n * chunks))
        .collect();
    let stages = p.pipeline_parallel_size;
    let uneven = if layers > stages && chunks == 1 && stages > 1 {
        let share = layers / stages;
        format!(
            "; or keep {stages} stages with first_stage_layers: {}",
            layers - share * (stages - 1)
        )
    } else {
        String::new()
    };
    format!(
        "even choices for {chunks} chunk(s) are {}{uneven}",
        list(good)
    )
}

/// Every divisor, in order.
pub(super) fn divisors(n: usize) -> Vec<usize> {
    (1..=n.min(1 << 14))
        .filter(|d| n.is_multiple_of(*d))
        .collect()
}

pub(super) fn list(numbers: impl IntoIterator<Item = usize>) -> String {
    let words: Vec<_> = numbers.into_iter().map(|n| n.to_string()).collect();
    words.join(", ")
}

//! Every request against what the chosen backend claims.

use super::Rule;
use crate::{
    DType,
    config::{DeviceConfig, RecomputeModule},
    model::MlpSpec,
};

pub(super) const RULES: &[Rule] = &[
    Rule {
        id: "FAMILY-01",
        what: "a model family that the backend does not train",
        reads: &["backend"],
        check: |facts, faults| {
            if let Some(model) = facts.model {
                let what = format!("models of the family {:?}", model.family);
                facts.require(faults, "model", &what, "choose another model", |c| {
                    c.families.contains(&model.family)
                });
            }
        },
    },
    Rule {
        id: "DTYPE-01",
        what: "a compute dtype that the backend does not offer",
        reads: &["precision.compute"],
        check: |facts, faults| {
            let dtype = facts.config.precision.compute;
            if dtype == DType::F16 {
                return;
            }
            facts.require(
                faults,
                "precision.compute",
                &format!("computing in {}", dtype_name(dtype)),
                "write `f32`",
                |c| c.compute.contains(&dtype),
            );
        },
    },
    Rule {
        id: "DTYPE-02",
        what: "f16: there is no loss scaler, and its gradients underflow without one",
        reads: &["precision.compute", "precision.reduce"],
        check: |facts, faults| {
            let p = &facts.config.precision;
            for (path, dtype) in [
                ("precision.compute", p.compute),
                ("precision.reduce", p.reduce),
            ] {
                if dtype == DType::F16 {
                    faults.error(
                        path,
                        "f16 gradients underflow without a loss scaler, and there is none",
                        "write `bf16`, which needs none, or `f32`",
                    );
                }
            }
        },
    },
    Rule {
        id: "DTYPE-03",
        what: "a dtype that gradients are not reduced in",
        reads: &["precision.reduce"],
        check: |facts, faults| {
            let dtype = facts.config.precision.reduce;
            if !matches!(dtype, DType::F64 | DType::F32 | DType::Bf16 | DType::F16) {
                faults.error(
                    "precision.reduce",
                    format!("gradients cannot be reduced in {}", dtype_name(dtype)),
                    "write `f32`",
                );
            }
        },
    },
    Rule {
        id: "DTYPE-04",
        what: "a dtype that models are not exported in",
        reads: &["precision.export"],
        check: |facts, faults| {
            if let Some(dtype) = facts.config.precision.export
                && !matches!(dtype, DType::F64 | DType::F32 | DType::Bf16 | DType::F16)
            {
                faults.error(
                    "precision.export",
                    format!("a model cannot be exported in {}", dtype_name(dtype)),
                    "write `f64`, `f32`, `bf16` or `f16`, or leave the key out to keep the model's own",
                );
            }
        },
    },
    Rule {
        id: "DTYPE-05",
        what: "a reduce dtype that the backend does not offer",
        reads: &["precision.reduce"],
        check: |facts, faults| {
            let dtype = facts.config.precision.reduce;
            if matches!(dtype, DType::F64 | DType::F32 | DType::Bf16) {
                facts.require(
                    faults,
                    "precision.reduce",
                    &format!("reducing gradients in {}", dtype_name(dtype)),
                    "write `f32`",
                    |c| c.reduce.contains(&dtype),
                );
            }
        },
    },
    Rule {
        id: "DTYPE-06",
        what: "a dtype of saved activations that the backend does not offer",
        reads: &["precision.compute", "precision.saved_activations"],
        check: |facts, faults| {
            let precision = &facts.config.precision;
            if let Some(dtype) = precision.saved_activations
                && dtype != precision.compute
            {
                facts.require(
                    faults,
                    "precision.saved_activations",
                    &format!("keeping activations in {}", dtype_name(dtype)),
                    "leave the key out, which keeps them as they were computed",
                    |c| c.saved_activations.contains(&dtype),
                );
            }
        },
    },
    Rule {
        id: "DEV-01",
        what: "a device that the backend does not run on",
        reads: &["device"],
        check: |facts, faults| {
            let name = match facts.config.device {
                DeviceConfig::Cpu => "cpu",
                DeviceConfig::Cuda => "cuda",
            };
            facts.require(
                faults,
                "device",
                &format!("the device `{name}`"),
                "write `cpu`, or use a program that was built for the device: with cargo's feature of it (`cuda`), or \
                 against libraries that have it, whichever the backend needs",
                |c| c.devices.contains(name),
            );
        },
    },
    Rule {
        id: "DP-01",
        what: "more data-parallel ranks than the backend offers",
        reads: &["parallel.data_parallel_size"],
        check: |facts, faults| {
            let ranks = facts.config.parallel.data_parallel_size;
            if ranks > 1 {
                facts.require(
                    faults,
                    "parallel.data_parallel_size",
                    &format!("{ranks} data-parallel ranks"),
                    "write fewer",
                    |c| {
                        c.data_parallel
                            .is_some_and(|d| d.max_ranks.is_none_or(|most| ranks <= most))
                    },
                );
            }
        },
    },
    Rule {
        id: "DP-03",
        what: "replicas of sharded groups that the backend does not offer",
        reads: &["parallel.data_replicate_size"],
        check: |facts, faults| {
            let replicas = facts.config.parallel.data_replicate_size;
            if replicas > 1 {
                facts.require(
                    faults,
                    "parallel.data_replicate_size",
                    &format!("{replicas} replicas of a sharded group (HSDP)"),
                    "write 1",
                    |c| c.data_parallel.is_some_and(|d| d.replicate),
                );
            }
        },
    },
    Rule {
        id: "TP-01",
        what: "tensor parallelism that the backend does not offer",
        reads: &[
            "parallel.tensor_parallel_size",
            "parallel.sequence_parallel",
        ],
        check: |facts, faults| {
            let p = &facts.config.parallel;
            if p.tensor_parallel_size > 1 {
                facts.require(
                    faults,
                    "parallel.tensor_parallel_size",
                    &format!("tensor parallelism ({} ranks)", p.tensor_parallel_size),
                    "write 1",
                    |c| c.tensor_parallel.is_some(),
                );
            }
            if p.sequence_parallel && p.tensor_parallel_size > 1 {
                facts.require(
                    faults,
                    "parallel.sequence_parallel",
                    "sequence parallelism",
                    "write `false`",
                    |c| c.tensor_parallel.is_none_or(|t| t.sequence_parallel),
                );
            }
        },
    },
    Rule {
        id: "PP-01",
        what: "pipeline parallelism that the backend does not offer",
        reads: &[
            "parallel.pipeline_parallel_size",
            "parallel.virtual_pipeline_size",
        ],
        check: |facts, faults| {
            let p = &facts.config.parallel;
            if p.pipeline_parallel_size > 1 {
                facts.require(
                    faults,
                    "parallel.pipeline_parallel_size",
                    &format!("pipeline parallelism ({} stages)", p.pipeline_parallel_size),
                    "write 1",
                    |c| c.pipeline_parallel.is_some(),
                );
            }
            if p.virtual_pipeline_size > 1 && p.pipeline_parallel_size > 1 {
                facts.require(
                    faults,
                    "parallel.virtual_pipeline_size",
                    "several model chunks a stage (interleaved 1F1B)",
                    "write 1",
                    |c| c.pipeline_parallel.is_none_or(|t| t.interleaved),
                );
            }
        },
    },
    Rule {
        id: "CP-01",
        what: "context parallelism that the backend does not offer",
        reads: &["parallel.context_parallel_size"],
        check: |facts, faults| {
            let ranks = facts.config.parallel.context_parallel_size;
            if ranks > 1 {
                facts.require(
                    faults,
                    "parallel.context_parallel_size",
                    &format!("context parallelism ({ranks} ranks)"),
                    "write 1",
                    |c| c.context_parallel.is_some(),
                );
            }
        },
    },
    Rule {
        id: "EP-01",
        what: "expert parallelism that the backend does not offer",
        reads: &[
            "parallel.expert_parallel_size",
            "parallel.expert_tensor_parallel_size",
        ],
        check: |facts, faults| {
            let p = &facts.config.parallel;
            if p.expert_parallel_size > 1 {
                facts.require(
                    faults,
                    "parallel.expert_parallel_size",
                    &format!("expert parallelism ({} ranks)", p.expert_parallel_size),
                    "write 1",
                    |c| c.expert_parallel.is_some(),
                );
            }
            if let Some(ranks) = p.expert_tensor_parallel_size
                && ranks > 1
            {
                facts.require(
                    faults,
                    "parallel.expert_tensor_parallel_size",
                    &format!("tensor parallelism within experts ({ranks} ranks)"),
                    "write 1",
                    |c| c.expert_parallel.is_some_and(|e| e.expert_tensor),
                );
            }
        },
    },
    Rule {
        id: "RC-01",
        what: "recomputation that the backend does not offer",
        reads: &["recompute"],
        check: |facts, faults| {
            let recompute = &facts.config.recompute;
            if !recompute.modules.is_empty() {
                facts.require(
                    faults,
                    "recompute.modules",
                    "recomputing chosen modules",
                    "write `[]`",
                    |c| c.recompute.selective,
                );
            }
            if recompute.full_layers > 0 {
                facts.require(
                    faults,
                    "recompute.full_layers",
                    "recomputing whole layers",
                    "write 0",
                    |c| c.recompute.full,
                );
            }
        },
    },
    Rule {
        id: "RC-02",
        what: "recomputation of what the model does not have",
        reads: &["recompute"],
        check: |facts, faults| {
            let (Some(model), recompute) = (facts.model, &facts.config.recompute) else {
                return;
            };
            if recompute.full_layers > model.num_layers() {
                faults.error(
                    "recompute.full_layers",
                    format!(
                        "{} layers, but the model has {}",
                        recompute.full_layers,
                        model.num_layers()
                    ),
                    format!("write {} or less", model.num_layers()),
                );
            }
            let has = |want: fn(&MlpSpec) -> bool| model.layers.iter().any(|l| want(&l.mlp));
            let absent = [
                (
                    RecomputeModule::MlpActivation,
                    has(|m| matches!(m, MlpSpec::Dense { .. })),
                ),
                (
                    RecomputeModule::MoeActivation,
                    has(|m| matches!(m, MlpSpec::Moe)),
                ),
            ];
            for (module, there) in absent {
                let name = serde_json::to_value(module).unwrap_or_default();
                let name = name.as_str().unwrap_or_default();
                if recompute.modules.contains(&module) && !there {
                    faults.error(
                        "recompute.modules",
                        format!("{name}, but no layer of the model has it"),
                        "remove it",
                    );
                }
            }
        },
    },
];

fn dtype_name(dtype: DType) -> String {
    format!("{dtype:?}").to_lowercase()
}

//! What each rank will hold and do, as data.

use drivetrain_core::{
    Result,
    config::{JobSpec, LoadBalancing},
    mesh::{DeviceMesh, MeshAxis},
    model::{MlpSpec, ParameterKind, ParameterSpec},
    moe::RouterLosses,
    plan::{PipelineKind, PlannedCollective, PlannedOp, Sizes, TrainPlan, stages},
};

use crate::options::{AfterForward, Options};

/// Resolves a job that `check` found no fault in.
pub(crate) fn plan(backend: &str, job: &JobSpec) -> Result<TrainPlan> {
    let (mesh, model, config) = (job.mesh()?, &job.model, &job.config);
    let options = Options::read(config, backend).unwrap_or_default();
    let sizes = Sizes::of(job)?;
    Ok(TrainPlan {
        backend: backend.to_owned(),
        collectives: collectives(job, &mesh, options, sizes.num_microbatches),
        mesh,
        model: model.clone(),
        config: config.clone(),
        parameters: model.parameters(),
        stages: stages(model.num_layers(), &config.parallel)?,
        schedule: PipelineKind::from_config(&config.parallel),
        ops: ops(job, sizes.tokens, sizes.longest.min(sizes.tokens)),
        reference_tokens: sizes.tokens,
    })
}

/// Per micro-batch: root gathered once, blocks twice (but the last) unless they stay whole, and the load of experts where
/// it is balanced over ranks; all gradients are scattered, per micro-batch or per step. Per step: the norm.
fn collectives(
    job: &JobSpec,
    mesh: &DeviceMesh,
    options: Options,
    num_microbatches: usize,
) -> Vec<PlannedCollective> {
    let (model, precision) = (&job.model, &job.config.precision);
    let specs = model.parameters();
    let elements = |layer: Option<usize>| {
        let of = specs.iter().filter(|s| s.layer == layer);
        of.map(ParameterSpec::num_elements).sum::<usize>()
    };
    let mut list = Vec::new();
    let mut add =
        |operation: &str, axis: MeshAxis, bytes: usize, count: usize, overlaps: Option<&str>| {
            if mesh.size(axis) > 1 && count > 0 {
                list.push(PlannedCollective {
                    operation: operation.to_owned(),
                    axis,
                    bytes: bytes as u64,
                    count,
                    overlaps: overlaps.map(str::to_owned),
                });
            }
        };
    let after = options.reshard_after_forward.over(mesh.data_shard);
    let num_reductions = match options.accumulate_unsharded {
        true => num_microbatches.min(1),
        false => num_microbatches,
    };
    let during = |pass: &'static str| (options.prefetch > 0).then_some(pass);
    let last = model.num_layers().checked_sub(1);
    for layer in std::iter::once(None).chain((0..model.num_layers()).map(Some)) {
        let (shard, elements) = (MeshAxis::DataShard, elements(layer));
        // The root's comes first: there is nothing to hide it.
        let forward = layer.and(during("forward"));
        let bytes = elements * precision.compute.size();
        add("all_gather", shard, bytes, num_microbatches, forward);
        if layer.is_some() && layer != last {
            let operation = match after {
                None | Some(AfterForward::Keep) => None,
                Some(AfterForward::Free) => Some("all_gather".to_owned()),
                Some(AfterForward::Group(n)) => Some(format!("all_gather of {n} ranks")),
            };
            if let Some(operation) = operation {
                add(
                    &operation,
                    shard,
                    bytes,
                    num_microbatches,
                    during("backward"),
                );
            }
        }
        let backward = layer.and(during("backward"));
        let bytes = elements * precision.reduce.size();
        add("reduce_scatter", shard, bytes, num_reductions, backward);
        let (replicate, bytes) = (MeshAxis::DataReplicate, bytes / mesh.data_shard.max(1));
        add("all_reduce", replicate, bytes, num_reductions, None);
    }
    let losses = RouterLosses::new(&job.config, model);
    if losses.balancing == Some(LoadBalancing::Global) {
        let counts = losses.num_layers * losses.num_experts + 2;
        let bytes = counts * size_of::<f64>();
        for axis in [MeshAxis::DataShard, MeshAxis::DataReplicate] {
            add("all_reduce", axis, bytes, num_microbatches, None);
        }
    }
    add("all_reduce", MeshAxis::DataShard, 16, 1, None);
    list
}

/// The matrix products and attention of one micro-batch; what autograd keeps for backward beside them is counted
/// at the product that reads it.
fn ops(job: &JobSpec, tokens: usize, length: usize) -> Vec<PlannedOp> {
    let (model, size) = (&job.model, job.config.precision.compute.size());
    let mut list = Vec::new();
    let mut add = |kind: &str, module: String, m: usize, n: usize, k: usize, saved: usize| {
        list.push(PlannedOp {
            kind: kind.to_owned(),
            module,
            m,
            n,
            k,
            saved_bytes: (saved * size) as u64,
        });
    };
    for spec in model.parameters() {
        let (ParameterKind::ColumnLinear
        | ParameterKind::KeyValueLinear
        | ParameterKind::RowLinear
        | ParameterKind::Router
        | ParameterKind::Head) = spec.kind
        else {
            continue;
        };
        let (n, k) = (spec.shape[0], spec.shape[1]);
        // An expert's share, where the load is even.
        let tokens = match (spec.expert, model.moe) {
            (Some(_), Some(moe)) => (tokens * moe.experts_per_token).div_ceil(moe.num_experts),
            _ => tokens,
        };
        let module = spec.name.trim_end_matches(".weight").to_owned();
        add("gemm", module, tokens, n, k, tokens * k);
    }
    if model.tied_embeddings {
        let (v, d) = (model.vocab_size, model.hidden_size);
        add("gemm", "lm_head".to_owned(), tokens, v, d, tokens * d);
    }
    let heads = model.num_heads * model.head_dim;
    for (index, layer) in model.layers.iter().enumerate() {
        let seen = layer.sliding_window.map_or(length, |w| w.min(length));
        let module = format!("model.layers.{index}.self_attn");
        add("attention", module, tokens, seen, heads, 4 * tokens * heads);
        let (rows, ffn_size) = match (layer.mlp, model.moe) {
            (MlpSpec::Dense { ffn_size }, _) => (tokens, ffn_size),
            (MlpSpec::Moe, Some(moe)) => (tokens * moe.experts_per_token, moe.ffn_size),
            (MlpSpec::Moe, None) => continue,
        };
        let module = format!("model.layers.{index}.mlp");
        add("swiglu", module, rows, ffn_size, 1, 3 * rows * ffn_size);
    }
    list
}

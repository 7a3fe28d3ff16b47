//! What each rank will hold and do, as data.

use drivetrain_core::{
    Result,
    config::{JobSpec, LoadBalancing},
    mesh::{DeviceMesh, MeshAxis},
    model::{MlpSpec, ModelSpec, ParameterKind, ParameterSpec},
    moe::RouterLosses,
    plan::{PipelineKind, PlannedCollective, PlannedOp, Sizes, TrainPlan, stages},
};

use crate::options::Options;

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
        ops: ops(model, sizes.tokens, sizes.longest.min(sizes.tokens)),
        reference_tokens: sizes.tokens,
    })
}

/// Per micro-batch: root gathered once, blocks twice (but the last), all gradients scattered, and the load of experts
/// where it is balanced over ranks. Per step: the norm.
fn collectives(
    job: &JobSpec,
    mesh: &DeviceMesh,
    options: Options,
    num_microbatches: usize,
) -> Vec<PlannedCollective> {
    let model = &job.model;
    let specs = model.parameters();
    let bytes = |layer: Option<usize>| {
        let of = specs.iter().filter(|s| s.layer == layer);
        (of.map(ParameterSpec::num_elements).sum::<usize>() * size_of::<f32>()) as u64
    };
    let mut list = Vec::new();
    let mut add = |operation: &str, axis: MeshAxis, bytes: u64, count: usize| {
        if mesh.size(axis) > 1 {
            list.push(PlannedCollective {
                operation: operation.to_owned(),
                axis,
                bytes,
                count,
                overlaps: None,
            });
        }
    };
    let last = model.num_layers().checked_sub(1);
    for layer in std::iter::once(None).chain((0..model.num_layers()).map(Some)) {
        let again = options.reshard_after_forward && layer.is_some() && layer != last;
        let gathers = if again { 2 } else { 1 };
        let bytes = bytes(layer);
        add(
            "all_gather",
            MeshAxis::DataShard,
            bytes,
            gathers * num_microbatches,
        );
        add(
            "reduce_scatter",
            MeshAxis::DataShard,
            bytes,
            num_microbatches,
        );
        let shard = bytes / mesh.data_shard.max(1) as u64;
        add(
            "all_reduce",
            MeshAxis::DataReplicate,
            shard,
            num_microbatches,
        );
    }
    let losses = RouterLosses::new(&job.config, model);
    if losses.balancing == Some(LoadBalancing::Global) {
        let counts = losses.num_layers * losses.num_experts + 2;
        let bytes = (counts * size_of::<f64>()) as u64;
        for axis in [MeshAxis::DataShard, MeshAxis::DataReplicate] {
            add("all_reduce", axis, bytes, num_microbatches);
        }
    }
    add("all_reduce", MeshAxis::DataShard, 16, 1);
    list
}

/// The matrix products and attention of one micro-batch; what autograd keeps for backward beside them is counted
/// at the product that reads it.
fn ops(model: &ModelSpec, tokens: usize, length: usize) -> Vec<PlannedOp> {
    let mut list = Vec::new();
    let mut add = |kind: &str, module: String, m: usize, n: usize, k: usize, saved: usize| {
        list.push(PlannedOp {
            kind: kind.to_owned(),
            module,
            m,
            n,
            k,
            saved_bytes: (saved * size_of::<f32>()) as u64,
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

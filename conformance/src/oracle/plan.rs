//! What the reference will do: everything on every rank.

use drivetrain_core::{
    Result,
    config::JobSpec,
    mesh::MeshAxis,
    model::{MlpSpec, ModelSpec, ParameterSpec},
    plan::{PipelineKind, PlannedCollective, PlannedOp, TrainPlan, stages},
};

use super::backend::NAME;

/// Tokens that the operations are counted for.
const REFERENCE_TOKENS: usize = 1024;

pub(super) fn plan(job: &JobSpec) -> Result<TrainPlan> {
    let mesh = job.mesh()?;
    let parameters = job.model.parameters();
    let collectives = if mesh.data_size() > 1 {
        let reduce = |p: &ParameterSpec| PlannedCollective {
            operation: "all_reduce".to_owned(),
            axis: MeshAxis::DataShard,
            bytes: 8 * p.num_elements() as u64,
            count: 1,
            overlaps: None,
        };
        parameters.iter().map(reduce).collect()
    } else {
        Vec::new()
    };
    Ok(TrainPlan {
        backend: NAME.to_owned(),
        mesh,
        model: job.model.clone(),
        config: job.config.clone(),
        parameters,
        stages: stages(job.model.num_layers(), &job.config.parallel)?,
        schedule: PipelineKind::from_config(&job.config.parallel),
        ops: products(&job.model),
        collectives,
        reference_tokens: REFERENCE_TOKENS,
    })
}

/// The matrix products, which are nearly all of the work; f64 values are kept for each.
fn products(model: &ModelSpec) -> Vec<PlannedOp> {
    let (d, e) = (model.hidden_size, model.head_dim);
    let (he, ke) = (model.num_heads * e, model.num_kv_heads * e);
    let mut ops = Vec::new();
    let mut add = |module: String, m: usize, n: usize, k: usize| {
        ops.push(PlannedOp {
            kind: "gemm".to_owned(),
            module,
            m,
            n,
            k,
            saved_bytes: 8 * (m * n) as u64,
        });
    };
    let t = REFERENCE_TOKENS;
    for (index, layer) in model.layers.iter().enumerate() {
        let attention = format!("layers.{index}.attention");
        for (name, n, k) in [("q", he, d), ("k", ke, d), ("v", ke, d), ("o", d, he)] {
            add(format!("{attention}.{name}_proj"), t, n, k);
        }
        let (tokens, f) = match (layer.mlp, model.moe) {
            (MlpSpec::Dense { ffn_size }, _) => (t, ffn_size),
            (MlpSpec::Moe, Some(moe)) => (t * moe.experts_per_token, moe.ffn_size),
            (MlpSpec::Moe, None) => continue,
        };
        for (name, n, k) in [("gate", f, d), ("up", f, d), ("down", d, f)] {
            add(format!("layers.{index}.mlp.{name}_proj"), tokens, n, k);
        }
    }
    add("head".to_owned(), t, model.vocab_size, d);
    ops
}

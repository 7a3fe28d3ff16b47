//! The plan: operations and collectives, from the same modules and shares that the engine runs.

use drivetrain_core::{
    Result,
    config::JobSpec,
    mesh::MeshAxis,
    plan::{PipelineKind, PlannedCollective, PlannedOp, Sizes, TrainPlan, stages},
};

use crate::model::Model;

/// Plans a job that `check` found sound.
///
/// # Errors
/// `Unsupported` for a model that cannot be built.
pub(crate) fn plan(backend: &str, job: &JobSpec) -> Result<TrainPlan> {
    let model = Model::new(&job.model, job.config.logits_budget_bytes)?;
    let mesh = job.mesh()?;
    let sizes = Sizes::of(job)?;
    Ok(TrainPlan {
        backend: backend.to_owned(),
        mesh,
        parameters: job.model.parameters(),
        stages: stages(job.model.num_layers(), &job.config.parallel)?,
        schedule: PipelineKind::from_config(&job.config.parallel),
        ops: ops(&model, sizes.tokens),
        collectives: collectives(&model, mesh.data_size()),
        reference_tokens: sizes.tokens,
        model: job.model.clone(),
        config: job.config.clone(),
    })
}

fn ops(model: &Model, tokens: usize) -> Vec<PlannedOp> {
    let mut ops = vec![model.embedding.plan(tokens)];
    ops.extend(model.blocks.iter().flat_map(|block| block.plan(tokens)));
    ops.extend(model.head.plan(tokens));
    ops
}

fn collectives(model: &Model, ranks: usize) -> Vec<PlannedCollective> {
    let sum = |bytes: usize, count| PlannedCollective {
        operation: "all_reduce".to_owned(),
        axis: MeshAxis::DataShard,
        bytes: bytes as u64,
        count,
        overlaps: None,
    };
    // Loss; squared norm and finite flag.
    let mut planned = vec![sum(size_of::<f64>(), 1), sum(2 * size_of::<f64>(), 1)];
    if ranks > 1 {
        for bucket in model.layout.buckets() {
            for (operation, overlaps) in
                [("reduce_scatter", Some("backward")), ("all_gather", None)]
            {
                planned.push(PlannedCollective {
                    operation: operation.to_owned(),
                    axis: MeshAxis::DataShard,
                    bytes: (bucket.len() * size_of::<f32>()) as u64,
                    count: 1,
                    overlaps: overlaps.map(str::to_owned),
                });
            }
        }
    }
    planned
}

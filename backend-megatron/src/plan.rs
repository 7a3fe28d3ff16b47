//! The plan: operations and collectives, from the same modules and shares that the engine runs.

use drivetrain_core::{
    Result,
    config::JobSpec,
    mesh::MeshAxis,
    plan::{PipelineKind, PlannedCollective, Sizes, TrainPlan, stages},
};

use crate::{model::Model, ranks::RankShape};

/// Plans a job that `check` found sound.
///
/// # Errors
/// `Unsupported` for a model that cannot be built.
pub(crate) fn plan(backend: &str, job: &JobSpec) -> Result<TrainPlan> {
    let mesh = job.mesh()?;
    let sizes = Sizes::of(job)?;
    let mut plan = TrainPlan {
        backend: backend.to_owned(),
        mesh,
        parameters: job.model.parameters(),
        stages: stages(job.model.num_layers(), &job.config.parallel)?,
        schedule: PipelineKind::from_config(&job.config.parallel),
        ops: Vec::new(),
        collectives: Vec::new(),
        reference_tokens: sizes.tokens,
        model: job.model.clone(),
        config: job.config.clone(),
    };
    for stage in 0..mesh.pipeline {
        // Every rank of a stage does the same; the first stands for all.
        let first = stage * mesh.stage_size();
        let (model, shape) = (Model::new(&plan, first)?, RankShape::new(&plan, first));
        let tokens = sizes.tokens.div_ceil(mesh.context);
        let rows = match shape.tensor.sequence {
            true => tokens.div_ceil(mesh.tensor),
            false => tokens,
        };
        for chunk in &model.chunks {
            plan.ops.extend(chunk.plan(tokens, rows));
        }
        plan.collectives.extend(collectives(&model));
    }
    Ok(plan)
}

fn collectives(model: &Model) -> Vec<PlannedCollective> {
    let sum = |bytes: usize, count| PlannedCollective {
        operation: "all_reduce".to_owned(),
        axis: MeshAxis::DataShard,
        bytes: bytes as u64,
        count,
        overlaps: None,
    };
    // Loss; squared norm and finite flag.
    let mut planned = vec![sum(size_of::<f64>(), 1), sum(2 * size_of::<f64>(), 1)];
    for region in model.layout.regions() {
        if model.layout.groups()[region.group].len() == 1 {
            continue;
        }
        for (operation, overlaps) in [("reduce_scatter", Some("backward")), ("all_gather", None)] {
            planned.push(PlannedCollective {
                operation: operation.to_owned(),
                axis: MeshAxis::DataShard,
                bytes: (region.range.len() * size_of::<f32>()) as u64,
                count: 1,
                overlaps: overlaps.map(str::to_owned),
            });
        }
    }
    planned
}

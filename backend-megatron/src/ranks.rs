//! This rank's place on the mesh, and its groups.

use std::sync::Arc;

use drivetrain_core::{
    Result, communicator::Communicator, engine::ForwardBackwardReport, mesh::MeshAxis,
    plan::TrainPlan,
};

use crate::{
    context_parallel::{ContextParallel, ContextShape},
    expert_parallel::{ExpertParallel, ExpertShape},
    model::missing,
    pipeline_parallel::{PipelineParallel, PipelineShape},
    tensor_parallel::{TensorParallel, TensorShape},
};

/// Where a rank is, as far as its modules care: plain data, known without any group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RankShape {
    pub(crate) tensor: TensorShape,
    pub(crate) context: ContextShape,
    pub(crate) pipeline: PipelineShape,
    pub(crate) experts: ExpertShape,
}

impl RankShape {
    /// That of a world rank.
    pub(crate) fn new(plan: &TrainPlan, rank: usize) -> Self {
        let mesh = &plan.mesh;
        Self {
            tensor: TensorShape::new(&plan.config.parallel, mesh, rank),
            context: ContextShape::new(mesh, rank),
            pipeline: PipelineShape::new(mesh, plan.stages.len(), rank),
            experts: ExpertShape::new(mesh, rank),
        }
    }
}

/// The groups along each axis of the mesh.
#[derive(Debug)]
pub(crate) struct Ranks {
    pub(crate) tensor: TensorParallel,
    pub(crate) context: ContextParallel,
    pub(crate) pipeline: PipelineParallel,
    /// Of a model with experts.
    pub(crate) experts: Option<ExpertParallel>,
    /// Over which loss and metrics add up: every stage (the last one has them) of every data rank.
    report: Arc<dyn Communicator>,
}

impl Ranks {
    /// Those of this rank. Collective over `world`.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn new(world: &dyn Communicator, plan: &TrainPlan) -> Result<Self> {
        let (mesh, shape) = (&plan.mesh, RankShape::new(plan, world.rank()));
        let axes = [
            MeshAxis::Pipeline,
            MeshAxis::DataReplicate,
            MeshAxis::DataShard,
        ];
        let report = mesh.group(world.rank(), &axes)?;
        Ok(Self {
            tensor: TensorParallel::new(world, mesh, shape.tensor)?,
            context: ContextParallel::new(world, mesh, shape.context)?,
            pipeline: PipelineParallel::new(world, mesh, shape.pipeline)?,
            experts: match plan.model.moe {
                Some(_) => Some(ExpertParallel::new(world, mesh)?),
                None => None,
            },
            report: world.subgroup(&report, "data")?,
        })
    }

    /// Those of a model with experts.
    ///
    /// # Errors
    /// `Defect` where it has none.
    pub(crate) fn experts(&self) -> Result<&ExpertParallel> {
        self.experts
            .as_ref()
            .ok_or_else(|| missing("a group of experts"))
    }

    /// Combines loss and metrics over stages and data ranks.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn all_reduce(&self, report: &mut ForwardBackwardReport) -> Result<()> {
        report.all_reduce(&*self.report)
    }
}

//! Pipeline parallelism (Narayanan et al. 2021): ranks that hold stages of layers and hand activations on, and their
//! gradients back. What a stage does when is core's schedule; here is only how it hands on.

mod transfers;

pub(crate) use transfers::{At, Transfers};

use std::sync::Arc;

use drivetrain_core::{
    DType, Result,
    communicator::{Communicator, Work},
    mesh::{DeviceMesh, MeshAxis},
    objective::TokenOutputs,
};

use crate::workspace::{Buffer, Workspace};

/// Which of how many stages this is, and in how many chunks the model lies over them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PipelineShape {
    pub(crate) stages: usize,
    pub(crate) stage: usize,
    num_chunks: usize,
}

impl PipelineShape {
    /// That of a world rank.
    pub(crate) fn new(mesh: &DeviceMesh, num_chunks: usize, rank: usize) -> Self {
        Self {
            stages: mesh.pipeline,
            stage: mesh.coordinate(rank, MeshAxis::Pipeline),
            num_chunks,
        }
    }

    /// This stage's chunks, as indices among those of the model.
    pub(crate) fn chunks(&self) -> impl Iterator<Item = usize> + use<> {
        (self.stage..self.num_chunks).step_by(self.stages)
    }
}

/// What another stage sends.
#[derive(Debug)]
pub(crate) struct Arriving(Work<'static, drivetrain_core::Buffer>);

impl Arriving {
    /// Waits for it.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn wait(self, workspace: &Workspace) -> Result<Buffer> {
        Ok(workspace.adopt(self.0.wait()?.try_into()?))
    }
}

/// The stages.
#[derive(Debug)]
pub(crate) struct PipelineParallel {
    pub(crate) shape: PipelineShape,
    group: Arc<dyn Communicator>,
}

impl PipelineParallel {
    /// The group of this rank. Collective over `world`.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn new(
        world: &dyn Communicator,
        mesh: &DeviceMesh,
        shape: PipelineShape,
    ) -> Result<Self> {
        let ranks = mesh.group(world.rank(), &[MeshAxis::Pipeline])?;
        Ok(Self {
            shape,
            group: world.subgroup(&ranks, MeshAxis::Pipeline.name())?,
        })
    }

    /// Starts to hand a stage what it waits for: between thread ranks the buffer itself.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn send(&self, stage: usize, values: Buffer) -> Result<Work<'static>> {
        self.group.send(values.into_vec().into(), stage)
    }

    /// Starts to take in what a stage sends, `len` elements.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn receive(&self, stage: usize, len: usize) -> Result<Arriving> {
        self.group.receive(DType::F32, len, stage).map(Arriving)
    }

    /// Tells every stage what the last one computed; the others come with zeros of the same lengths.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn tell(&self, outputs: &mut TokenOutputs) -> Result<()> {
        if self.shape.stages == 1 {
            return Ok(());
        }
        let last = self.shape.stages - 1;
        let mut all = vec![&mut outputs.log_probs];
        all.extend(outputs.entropy.as_mut());
        for values in all {
            self.group.broadcast(values.into(), last)?.wait()?;
        }
        Ok(())
    }
}

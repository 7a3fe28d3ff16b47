//! Expert parallelism (Lepikhin et al. 2021): ranks that hold some of the experts, and parts of each.
//!
//! Within a stage the ranks are arranged a second time: expert-tensor ranks are neighbours that hold parts of the
//! same experts, expert ranks hold different ones, and what is left are replicas. Every rank routes its own rows of
//! the tokens, sends each to the expert ranks that it chose ([`Dispatch`]) and gets the results back.

mod dispatch;

pub(crate) use dispatch::Dispatch;

use std::{ops::Range, sync::Arc};

use drivetrain_core::{
    Result,
    communicator::Communicator,
    mesh::{DeviceMesh, MeshAxis},
    plan::share,
};

/// Which of how many expert and expert-tensor ranks this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ExpertShape {
    pub(crate) ranks: usize,
    pub(crate) rank: usize,
    pub(crate) tensor_ranks: usize,
    pub(crate) tensor_rank: usize,
}

impl ExpertShape {
    /// That of a world rank.
    pub(crate) fn new(mesh: &DeviceMesh, rank: usize) -> Self {
        Self {
            ranks: mesh.expert,
            rank: mesh.coordinate(rank, MeshAxis::Expert),
            tensor_ranks: mesh.expert_tensor,
            tensor_rank: mesh.coordinate(rank, MeshAxis::ExpertTensor),
        }
    }

    /// The experts of an expert rank.
    pub(crate) fn experts_of(&self, rank: usize, num_experts: usize) -> Range<usize> {
        share(num_experts, self.ranks, rank)
    }

    /// This rank's experts.
    pub(crate) fn experts(&self, num_experts: usize) -> Range<usize> {
        self.experts_of(self.rank, num_experts)
    }

    /// This rank's part of an expert's width.
    pub(crate) fn width(&self, ffn_size: usize) -> usize {
        share(ffn_size, self.tensor_ranks, self.tensor_rank).len()
    }
}

/// The groups that experts need.
#[derive(Debug)]
pub(crate) struct ExpertParallel {
    pub(crate) shape: ExpertShape,
    /// Expert ranks with the same part of their experts.
    experts: Arc<dyn Communicator>,
    /// Ranks with parts of the same experts.
    tensor: Arc<dyn Communicator>,
    /// Both: those who hold all experts among them.
    all: Arc<dyn Communicator>,
    /// Ranks that see the same sequences, each its own rows.
    pub(crate) sequences: Arc<dyn Communicator>,
    /// Ranks that see different sequences.
    pub(crate) data: Arc<dyn Communicator>,
}

impl ExpertParallel {
    /// The groups of this rank. Collective over `world`.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn new(world: &dyn Communicator, mesh: &DeviceMesh) -> Result<Self> {
        let group = |axes: &[MeshAxis], label| {
            let ranks = mesh.group(world.rank(), axes)?;
            world.subgroup(&ranks, label)
        };
        Ok(Self {
            shape: ExpertShape::new(mesh, world.rank()),
            experts: group(&[MeshAxis::Expert], MeshAxis::Expert.name())?,
            tensor: group(&[MeshAxis::ExpertTensor], MeshAxis::ExpertTensor.name())?,
            all: group(&[MeshAxis::Expert, MeshAxis::ExpertTensor], "experts")?,
            sequences: group(&[MeshAxis::Context, MeshAxis::Tensor], "sequences")?,
            data: group(&[MeshAxis::DataReplicate, MeshAxis::DataShard], "data")?,
        })
    }

    /// Whether this rank holds all experts whole.
    fn is_alone(&self) -> bool {
        self.shape.ranks * self.shape.tensor_ranks == 1
    }
}

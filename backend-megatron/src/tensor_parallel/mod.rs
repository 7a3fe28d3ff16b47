//! Tensor parallelism (Shoeybi et al. 2019): ranks that hold parts of each matrix and compute on the same tokens.
//!
//! A column-parallel product (q, k, v; gate, up; the head) has a part of its outputs on each rank, a row-parallel
//! one (o; down) a part of its inputs, so that its output is a sum over ranks. Between them the residual stream
//! lies whole on every rank, or under sequence parallelism its rows are split ([`crate::sequence_parallel`]).

use std::sync::Arc;

use drivetrain_core::{
    Result,
    communicator::{Communicator, ReduceOp},
    config::ParallelConfig,
    mesh::{DeviceMesh, MeshAxis},
    plan::share,
};

use crate::{
    sequence_parallel,
    workspace::{Buffer, Workspace},
};

/// Which of how many tensor ranks this is, and whether rows of the residual stream are split over them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TensorShape {
    pub(crate) size: usize,
    pub(crate) index: usize,
    pub(crate) sequence: bool,
}

impl TensorShape {
    /// That of a world rank.
    pub(crate) fn new(parallel: &ParallelConfig, mesh: &DeviceMesh, rank: usize) -> Self {
        Self {
            size: mesh.tensor,
            index: mesh.coordinate(rank, MeshAxis::Tensor),
            sequence: parallel.sequence_parallel && mesh.tensor > 1,
        }
    }

    /// This rank's part of `0..len`.
    pub(crate) fn share(&self, len: usize) -> std::ops::Range<usize> {
        share(len, self.size, self.index)
    }

    /// Whether another rank computes the same gradient of a tensor that all hold whole: of a norm, say, unless
    /// each sees its own rows.
    pub(crate) fn redundant(&self) -> bool {
        !self.sequence && self.index > 0
    }
}

/// The tensor ranks. The residual stream's rows on this rank are S of the T.
#[derive(Debug)]
pub(crate) struct TensorParallel {
    pub(crate) shape: TensorShape,
    group: Arc<dyn Communicator>,
}

/// All T rows: the residual stream's own, or gathered.
pub(crate) enum Gathered<'a> {
    Own(&'a [f32]),
    All(Buffer),
}

impl TensorParallel {
    /// The group of this rank. Collective over `world`.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn new(
        world: &dyn Communicator,
        mesh: &DeviceMesh,
        shape: TensorShape,
    ) -> Result<Self> {
        let ranks = mesh.group(world.rank(), &[MeshAxis::Tensor])?;
        Ok(Self {
            shape,
            group: world.subgroup(&ranks, MeshAxis::Tensor.name())?,
        })
    }

    /// Whether there is one rank only.
    pub(crate) fn is_alone(&self) -> bool {
        self.shape.size == 1
    }

    /// The ranks.
    pub(crate) fn group(&self) -> &dyn Communicator {
        &*self.group
    }

    /// All rows of x [S, W], [T, W]. `rows` says how many each rank has of what is split, and W.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn gather<'a>(
        &self,
        workspace: &Workspace,
        x: &'a [f32],
        rows: (&[usize], usize),
    ) -> Result<Gathered<'a>> {
        match self.shape.sequence {
            true => sequence_parallel::gather(self.group(), workspace, x, rows).map(Gathered::All),
            false => Ok(Gathered::Own(x)),
        }
    }

    /// The sum over ranks of `partial` [T, W], of which this rank keeps its rows: [S, W].
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn reduce(
        &self,
        workspace: &Workspace,
        mut partial: Buffer,
        rows: (&[usize], usize),
    ) -> Result<Buffer> {
        if self.shape.sequence {
            return sequence_parallel::reduce(self.group(), workspace, partial, rows);
        }
        if !self.is_alone() {
            let whole = (&mut *partial).into();
            self.group.all_reduce(whole, ReduceOp::Sum)?.wait()?;
        }
        Ok(partial)
    }
}

impl std::ops::Deref for Gathered<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match self {
            Self::Own(x) => x,
            Self::All(x) => x,
        }
    }
}

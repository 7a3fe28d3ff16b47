//! How ranks are arranged.

use serde::{Deserialize, Serialize};

use crate::{Error, ErrorKind, Result};

/// An axis of parallelism.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MeshAxis {
    /// Stages of layers.
    Pipeline,
    /// Replicas that hold the same shards (HSDP's outer axis).
    DataReplicate,
    /// Ranks over which data is split and parameters or optimizer state are sharded.
    DataShard,
    /// Parts of a sequence.
    Context,
    /// Parts of each matrix (and of the sequence between them, under sequence parallelism).
    Tensor,
    /// Data-parallel replicas of the experts: in the expert view of the mesh.
    ExpertData,
    /// Groups of experts: in the expert view.
    Expert,
    /// Parts of each expert's matrices: in the expert view.
    ExpertTensor,
}

impl MeshAxis {
    /// Its name in plans, errors and recordings.
    pub fn name(self) -> &'static str {
        match self {
            Self::Pipeline => "pipeline",
            Self::DataReplicate => "data_replicate",
            Self::DataShard => "data_shard",
            Self::Context => "context",
            Self::Tensor => "tensor",
            Self::ExpertData => "expert_data",
            Self::Expert => "expert",
            Self::ExpertTensor => "expert_tensor",
        }
    }
}

/// Sizes of the axes. Two views of the same ranks: the dense one (pipeline, data_replicate, data_shard,
/// context, tensor; outermost first, so tensor peers are neighbours) and, within a stage, the expert one
/// (expert_data, expert, expert_tensor).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceMesh {
    /// Stages.
    pub pipeline: usize,
    /// Outer data-parallel replicas.
    pub data_replicate: usize,
    /// Sharded data-parallel ranks.
    pub data_shard: usize,
    /// Context-parallel ranks.
    pub context: usize,
    /// Tensor-parallel ranks.
    pub tensor: usize,
    /// Expert-parallel ranks.
    pub expert: usize,
    /// Expert-tensor-parallel ranks.
    pub expert_tensor: usize,
}

impl Default for DeviceMesh {
    fn default() -> Self {
        Self {
            pipeline: 1,
            data_replicate: 1,
            data_shard: 1,
            context: 1,
            tensor: 1,
            expert: 1,
            expert_tensor: 1,
        }
    }
}

impl DeviceMesh {
    /// A mesh of data-parallel ranks only.
    pub fn data_parallel(ranks: usize) -> Self {
        Self {
            data_shard: ranks,
            ..Self::default()
        }
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.pipeline * self.stage_size()
    }

    /// Ranks of one pipeline stage.
    pub fn stage_size(&self) -> usize {
        self.data_size() * self.context * self.tensor
    }

    /// Ranks that see different data: `data_replicate x data_shard`.
    pub fn data_size(&self) -> usize {
        self.data_replicate * self.data_shard
    }

    /// Size of an axis.
    pub fn size(&self, axis: MeshAxis) -> usize {
        match axis {
            MeshAxis::Pipeline => self.pipeline,
            MeshAxis::DataReplicate => self.data_replicate,
            MeshAxis::DataShard => self.data_shard,
            MeshAxis::Context => self.context,
            MeshAxis::Tensor => self.tensor,
            MeshAxis::ExpertData => self.stage_size() / (self.expert * self.expert_tensor).max(1),
            MeshAxis::Expert => self.expert,
            MeshAxis::ExpertTensor => self.expert_tensor,
        }
    }

    /// Distance between neighbours on an axis, in ranks.
    fn stride(&self, axis: MeshAxis) -> usize {
        match axis {
            MeshAxis::Tensor | MeshAxis::ExpertTensor => 1,
            MeshAxis::Context => self.tensor,
            MeshAxis::DataShard => self.tensor * self.context,
            MeshAxis::DataReplicate => self.tensor * self.context * self.data_shard,
            MeshAxis::Pipeline => self.stage_size(),
            MeshAxis::Expert => self.expert_tensor,
            MeshAxis::ExpertData => self.expert_tensor * self.expert,
        }
    }

    /// A rank's coordinate on an axis.
    pub fn coordinate(&self, rank: usize, axis: MeshAxis) -> usize {
        (rank / self.stride(axis)) % self.size(axis)
    }

    /// A rank's index among the data-parallel ranks (which share of the batch it gets).
    pub fn data_index(&self, rank: usize) -> usize {
        self.coordinate(rank, MeshAxis::DataReplicate) * self.data_shard
            + self.coordinate(rank, MeshAxis::DataShard)
    }

    /// Whether a rank is the first of those that see the same data (its model-parallel peers).
    pub fn is_data_leader(&self, rank: usize) -> bool {
        [MeshAxis::Pipeline, MeshAxis::Context, MeshAxis::Tensor]
            .iter()
            .all(|axis| self.coordinate(rank, *axis) == 0)
    }

    /// The ranks that differ from `rank` on these axes only, in rank order, `rank` among them.
    ///
    /// # Errors
    /// `Defect` if dense and expert axes are mixed.
    pub fn group(&self, rank: usize, axes: &[MeshAxis]) -> Result<Vec<usize>> {
        use MeshAxis::{Expert, ExpertData, ExpertTensor, Pipeline};
        let expert = |a: &MeshAxis| matches!(a, Expert | ExpertData | ExpertTensor);
        let view: &[MeshAxis] = if axes.iter().any(expert) {
            &[Pipeline, ExpertData, Expert, ExpertTensor]
        } else {
            &[
                Pipeline,
                MeshAxis::DataReplicate,
                MeshAxis::DataShard,
                MeshAxis::Context,
                MeshAxis::Tensor,
            ]
        };
        if let Some(stray) = axes.iter().find(|a| !view.contains(a)) {
            return Err(Error::new(
                ErrorKind::Defect,
                "mesh_group",
                "dense and expert axes in one group",
            )
            .with("axis", stray.name()));
        }
        let fixed: Vec<_> = view.iter().filter(|a| !axes.contains(a)).collect();
        Ok((0..self.world_size())
            .filter(|&r| {
                fixed
                    .iter()
                    .all(|a| self.coordinate(r, **a) == self.coordinate(rank, **a))
            })
            .collect())
    }
}

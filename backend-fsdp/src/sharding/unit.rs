//! What a rank keeps of a unit between steps: flat f32 shards.

use drivetrain_core::Result;
use tch::{Device, Kind, Tensor};

use super::UnitLayout;
use crate::error::{Torch, torch};

/// This rank's shard of a unit: weights, moments, and while a step is open the gradient.
#[derive(Debug)]
pub(crate) struct Unit {
    /// Where each parameter's part lies.
    pub(crate) layout: UnitLayout,
    /// This rank's index in the shard group.
    pub(crate) rank: usize,
    /// Master weights, `[shard]`.
    pub(crate) weight: Tensor,
    /// AdamW's first moment, `[shard]`.
    pub(crate) exp_avg: Tensor,
    /// AdamW's second moment, `[shard]`.
    pub(crate) exp_avg_sq: Tensor,
    /// Gradient summed over data-parallel ranks and micro-batches, `[shard]`.
    pub(crate) gradient: Option<Tensor>,
    /// This rank's gradient of the whole unit summed over micro-batches, where it is not reduced yet: rank after rank,
    /// each one's shard.
    pub(crate) unsharded: Option<Tensor>,
}

impl Unit {
    /// A unit whose shard is all 0.
    pub(crate) fn zeros(layout: UnitLayout, rank: usize, device: Device) -> Result<Self> {
        let len = layout.shard_len(rank);
        let zeros = || zeros(len, device).map_err(torch("allocate_unit"));
        Ok(Self {
            weight: zeros()?,
            exp_avg: zeros()?,
            exp_avg_sq: zeros()?,
            gradient: None,
            unsharded: None,
            layout,
            rank,
        })
    }

    /// A parameter's part of a flat shard tensor of this unit.
    pub(crate) fn part(&self, shard: &Tensor, parameter: usize) -> Torch<Tensor> {
        let range = self.layout.shard(self.rank, parameter);
        shard.f_narrow(0, range.start as i64, range.len() as i64)
    }

    /// Number of elements of this rank's shard.
    pub(crate) fn len(&self) -> usize {
        self.layout.shard_len(self.rank)
    }
}

pub(super) fn zeros(len: usize, device: Device) -> Torch<Tensor> {
    Tensor::f_zeros([len as i64], (Kind::Float, device))
}

pub(super) fn empty(len: usize, kind: Kind, device: Device) -> Torch<Tensor> {
    Tensor::f_empty([len as i64], (kind, device))
}

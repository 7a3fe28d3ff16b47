//! Data parallelism with a distributed optimizer (Megatron's; ZeRO stage 1 of Rajbhandari et al. 2020, with
//! gradients reduce-scattered).
//!
//! Every rank holds all weights and, of each bucket, owns a share: it receives the sum of that share's
//! gradients, updates it with moments that only it holds, and sends the new weights to all. Shares are
//! cuts of the flat bucket, uneven or empty where it does not divide: there is no padding to enter a norm or
//! an export.

mod gradients;
mod reduction;

pub(crate) use gradients::Gradients;
pub(crate) use reduction::{Reduction, Slot};

use std::{ops::Range, sync::Arc};

use drivetrain_core::{
    Result,
    communicator::{Communicator, Work},
    engine::ForwardBackwardReport,
    mesh::{DeviceMesh, MeshAxis},
};

use crate::{
    weights::{Buffers, Layout},
    workspace::{Buffer, Workspace},
};

/// The data-parallel ranks and what each owns.
#[derive(Debug)]
pub(crate) struct DataParallel {
    group: Arc<dyn Communicator>,
    /// Elements of each rank's share, by bucket.
    counts: Vec<Vec<usize>>,
}

/// Elements of each rank's share of `len`, as even as can be.
pub(crate) fn share_counts(len: usize, ranks: usize) -> Vec<usize> {
    (0..ranks)
        .map(|r| len * (r + 1) / ranks - len * r / ranks)
        .collect()
}

impl DataParallel {
    /// The group of this rank along the data axes. Collective over `world`.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn new(
        world: &dyn Communicator,
        mesh: &DeviceMesh,
        layout: &Layout,
    ) -> Result<Self> {
        let axes = [MeshAxis::DataReplicate, MeshAxis::DataShard];
        let ranks = mesh.group(world.rank(), &axes)?;
        let group = world.subgroup(&ranks, MeshAxis::DataShard.name())?;
        let counts = layout
            .buckets()
            .iter()
            .map(|b| share_counts(b.len(), ranks.len()))
            .collect();
        Ok(Self { group, counts })
    }

    /// Number of data-parallel ranks.
    pub(crate) fn size(&self) -> usize {
        self.group.world_size()
    }

    /// This rank's index among them.
    pub(crate) fn rank(&self) -> usize {
        self.group.rank()
    }

    /// What this rank owns of a bucket.
    pub(crate) fn own(&self, bucket: usize) -> Range<usize> {
        let counts = &self.counts[bucket];
        let start = counts[..self.rank()].iter().sum();
        start..start + counts[self.rank()]
    }

    /// Number of buckets.
    pub(crate) fn num_buckets(&self) -> usize {
        self.counts.len()
    }

    /// Combines loss and metrics over the ranks.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn all_reduce(&self, report: &mut ForwardBackwardReport) -> Result<()> {
        report.all_reduce(&*self.group)
    }

    /// Sends every owner's weights to all ranks.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn gather(&self, workspace: &Workspace, params: &mut Buffers) -> Result<()> {
        if self.size() == 1 {
            return Ok(());
        }
        let shares: Vec<Buffer> = (0..self.num_buckets())
            .map(|b| workspace.copy(&params.bucket(b)[self.own(b)]))
            .collect();
        let works = shares
            .iter()
            .zip(params.buckets_mut())
            .zip(&self.counts)
            .map(|((share, bucket), counts)| {
                self.group
                    .all_gather((&**share).into(), bucket.into(), counts)
            })
            .collect::<Result<Vec<_>>>()?;
        works.into_iter().try_for_each(Work::wait)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_even_what_does_not_divide() {
        assert_eq!(share_counts(97, 4), [24, 24, 24, 25]);
        assert_eq!(share_counts(1, 3), [0, 0, 1]);
        assert_eq!(share_counts(0, 2), [0, 0]);
    }
}

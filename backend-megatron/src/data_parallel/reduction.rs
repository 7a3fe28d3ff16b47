//! Reduce-scatter of gradients, region by region, each started as soon as backward is done with its bucket.

use drivetrain_core::{
    Result,
    communicator::{ReduceOp, Work},
};
use drivetrain_kernels::Memory;

use super::DataParallel;
use crate::{
    weights::{Buffers, Layout},
    workspace::{Buffer, Workspace},
};

/// The buckets of a backward pass that are under way. Slots outlive the operations that borrow them.
#[derive(Debug)]
pub(crate) struct Slots {
    slots: Vec<Slot>,
}

#[derive(Debug)]
struct Slot {
    /// This rank's sums, moved here from the gradients once the bucket is started.
    local: Option<Memory>,
    /// The share of each region's sums over its replicas; none of a region that this rank holds alone.
    received: Vec<Option<Buffer>>,
}

/// The reductions of one backward pass.
#[derive(Debug)]
pub(crate) struct Reduction<'a> {
    data: &'a DataParallel,
    layout: &'a Layout,
    free: Vec<Option<&'a mut Slot>>,
    works: Vec<Work<'a>>,
}

impl Slots {
    /// One for each bucket.
    pub(crate) fn new(data: &DataParallel, workspace: &Workspace) -> Self {
        let received = |region| match data.is_alone(region) {
            true => None,
            false => Some(workspace.take(data.own(region).len())),
        };
        let slots = data
            .buckets
            .iter()
            .map(|regions| Slot {
                local: None,
                received: regions.clone().map(received).collect(),
            })
            .collect();
        Self { slots }
    }

    /// What came back: each started bucket, its sums, and what it received.
    pub(super) fn into_started(self) -> impl Iterator<Item = (usize, Memory, Vec<Option<Buffer>>)> {
        self.slots
            .into_iter()
            .enumerate()
            .filter_map(|(bucket, slot)| Some((bucket, slot.local?, slot.received)))
    }
}

impl<'a> Reduction<'a> {
    /// Nothing started yet.
    pub(crate) fn new(data: &'a DataParallel, layout: &'a Layout, slots: &'a mut Slots) -> Self {
        Self {
            data,
            layout,
            works: Vec::with_capacity(data.num_regions()),
            free: slots.slots.iter_mut().map(Some).collect(),
        }
    }

    /// Starts on a bucket that backward is done with. Ranks that hold the same elements start in the same order.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn start(&mut self, bucket: usize, local: &mut Buffers) -> Result<()> {
        let regions = self.data.buckets[bucket].clone();
        if regions.clone().all(|r| self.data.is_alone(r)) {
            return Ok(());
        }
        let Some(slot) = self.free[bucket].take() else {
            return Ok(());
        };
        let sums = slot.local.insert(std::mem::take(local.bucket_mut(bucket)));
        for part in self.layout.buckets()[bucket].parts() {
            if part.redundant {
                sums[part.range.clone()].fill(0.0);
            }
        }
        let sums: &'a [f32] = sums;
        for (region, received) in regions.zip(&mut slot.received) {
            let Some(received) = received else { continue };
            let work = self.data.group(region).reduce_scatter(
                sums[self.data.region(region).range.clone()].into(),
                (&mut **received).into(),
                &self.data.counts(region),
                ReduceOp::Sum,
            )?;
            self.works.push(work);
        }
        Ok(())
    }

    /// Waits for all.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn finish(self) -> Result<()> {
        self.works.into_iter().try_for_each(Work::wait)
    }
}

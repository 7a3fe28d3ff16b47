//! Reduce-scatter of gradients, bucket by bucket, each started as soon as backward is done with it.

use drivetrain_core::{
    Result,
    communicator::{ReduceOp, Work},
};

use super::DataParallel;
use crate::{
    weights::Buffers,
    workspace::{Buffer, Workspace},
};

/// A bucket under way. Slots outlive the operations that borrow them.
#[derive(Debug)]
pub(crate) struct Slot {
    /// Which bucket it holds, once started.
    pub(super) bucket: Option<usize>,
    /// This rank's sums, moved here from the gradients.
    pub(super) local: Vec<f32>,
    /// The share of the sums over ranks.
    pub(super) received: Buffer,
}

/// The reductions of one backward pass.
#[derive(Debug)]
pub(crate) struct Reduction<'a> {
    data: &'a DataParallel,
    free: std::slice::IterMut<'a, Slot>,
    works: Vec<Work<'a>>,
}

impl Slot {
    /// One for each bucket, in the order in which backward completes them (the last first); none where this
    /// rank is alone.
    pub(crate) fn all(data: &DataParallel, workspace: &Workspace) -> Vec<Self> {
        let buckets = if data.size() == 1 {
            0
        } else {
            data.num_buckets()
        };
        (0..buckets)
            .rev()
            .map(|bucket| Self {
                bucket: None,
                local: Vec::new(),
                received: workspace.take(data.own(bucket).len()),
            })
            .collect()
    }
}

impl<'a> Reduction<'a> {
    /// Nothing started yet.
    pub(crate) fn new(data: &'a DataParallel, slots: &'a mut [Slot]) -> Self {
        Self {
            data,
            works: Vec::with_capacity(slots.len()),
            free: slots.iter_mut(),
        }
    }

    /// Starts on a bucket that backward is done with. Buckets come last first.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn start(&mut self, bucket: usize, local: &mut Buffers) -> Result<()> {
        let Some(slot) = self.free.next() else {
            return Ok(());
        };
        slot.bucket = Some(bucket);
        slot.local = std::mem::take(local.bucket_mut(bucket));
        let work = self.data.group.reduce_scatter(
            slot.local.as_slice().into(),
            (&mut *slot.received).into(),
            &self.data.counts[bucket],
            ReduceOp::Sum,
        )?;
        self.works.push(work);
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

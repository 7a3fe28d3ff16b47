//! Reduce-scatter of gradients, region by region, each started as soon as backward is done with its bucket.

use std::{collections::VecDeque, ops::Range, sync::Arc};

use drivetrain_core::{
    Result,
    communicator::{Input, ReduceOp, Shared, Work},
};

use super::DataParallel;
use crate::{
    weights::{Layout, Sums},
    workspace::{Buffer, Workspace},
};

/// What a pass receives. Slots outlive the operations that write to them.
#[derive(Debug)]
pub(crate) struct Slots {
    /// By region: this rank's share of the sum over replicas; `None` until its bucket is complete, when the memory in
    /// which the weights before this step left is back.
    slots: Vec<Option<Buffer>>,
}

/// The reductions of one backward pass.
#[derive(Debug)]
pub(crate) struct Reduction<'a> {
    data: &'a DataParallel,
    layout: &'a Layout,
    pool: &'a Workspace,
    free: Vec<Option<&'a mut [Option<Buffer>]>>,
    /// By the bucket.
    works: VecDeque<(usize, Work<'a>)>,
    started: usize,
    /// How many buckets may be under way, where that is bounded.
    most: Option<usize>,
}

impl Slots {
    /// One for each region.
    pub(crate) fn new(data: &DataParallel) -> Self {
        Self {
            slots: (0..data.num_regions()).map(|_| None).collect(),
        }
    }

    /// What came, by region.
    pub(super) fn into_received(self) -> impl Iterator<Item = (usize, Buffer)> {
        let slots = self.slots.into_iter().enumerate();
        slots.filter_map(|(region, slot)| Some((region, slot?)))
    }
}

impl<'a> Reduction<'a> {
    /// Nothing started yet.
    pub(crate) fn new(
        data: &'a DataParallel,
        layout: &'a Layout,
        pool: &'a Workspace,
        slots: &'a mut Slots,
        most: Option<usize>,
    ) -> Self {
        let mut rest = slots.slots.as_mut_slice();
        let mut next = |regions: &Range<usize>| {
            let (own, after) = std::mem::take(&mut rest).split_at_mut(regions.len());
            rest = after;
            Some(own)
        };
        let free = data.buckets.iter().map(&mut next).collect();
        Self {
            data,
            layout,
            pool,
            works: VecDeque::with_capacity(data.num_regions()),
            started: 0,
            most,
            free,
        }
    }

    /// Starts on a bucket that backward is done with. Ranks that hold the same elements start in the same order.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn start(&mut self, bucket: usize, local: &mut Sums) -> Result<()> {
        let Some(slots) = self.free[bucket].take() else {
            return Ok(());
        };
        let mut sums = local.give(bucket);
        for part in self.layout.buckets()[bucket].parts() {
            if part.redundant {
                sums[part.range.clone()].fill(0.0);
            }
        }
        let regions = self.data.buckets[bucket].clone();
        if let [own] = &mut *slots
            && self.data.is_alone(regions.start)
        {
            *own = Some(sums);
            return Ok(());
        }
        let sums = Arc::new(sums);
        let shared = Shared::new(sums.clone());
        for (region, slot) in regions.zip(slots) {
            let range = self.data.region(region).range.clone();
            if self.data.is_alone(region) {
                *slot = Some(self.pool.copy(&sums[range]));
                continue;
            }
            let received = slot.insert(self.pool.take(self.data.own(region).len()));
            let work = self.data.group(region).reduce_scatter(
                Input::Shared(shared.slice(range)),
                (&mut **received).into(),
                &self.data.counts(region),
                ReduceOp::Sum,
            )?;
            self.works.push_back((self.started, work));
        }
        self.started += 1;
        // What the other ranks have sent too is finished here, so that its memory serves the next bucket.
        let (started, most) = (self.started, self.most);
        let ended = |(bucket, work): &mut (usize, Work<'_>)| {
            work.is_ready() || most.is_some_and(|most| started - *bucket > most)
        };
        while let Some((_, work)) = self.works.pop_front_if(ended) {
            work.wait()?;
        }
        Ok(())
    }

    /// Waits for all.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn finish(self) -> Result<()> {
        self.works.into_iter().try_for_each(|(_, work)| work.wait())
    }
}

//! The open step's gradients: this rank's own sums, and its shares of the sums over replicas.

use drivetrain_kernels::{Processor, ops::elementwise};

use super::{DataParallel, Slots};
use crate::{
    weights::{Layout, Sums},
    workspace::{Buffer, Workspace},
};

/// Gradients of one rank.
#[derive(Debug)]
pub(crate) struct Gradients {
    /// What backward writes. The first micro-batch of a pass overwrites whatever is there, which saves a pass over
    /// memory that clears it and one that reads the zeros.
    pub(crate) local: Sums,
    /// Of each region, the share this rank owns of the sum over its replicas; `None` before the first pass of a step.
    shares: Vec<Option<Buffer>>,
    /// Where both are from.
    pub(crate) pool: Workspace,
}

impl Gradients {
    /// None yet.
    pub(crate) fn new(layout: &Layout, data: &DataParallel, processor: &Processor) -> Self {
        let pool = Workspace::new(processor.clone());
        Self {
            local: Sums::new(layout, pool.clone()),
            shares: (0..data.num_regions()).map(|_| None).collect(),
            pool,
        }
    }

    /// This rank's share of a region, summed over its replicas. Nothing before the first pass of a step.
    pub(crate) fn own(&self, region: usize) -> &[f32] {
        self.shares[region].as_deref().unwrap_or_default()
    }

    /// The memory of that share, which is of no use any more.
    pub(crate) fn give(&mut self, data: &DataParallel, region: usize) -> Buffer {
        let share = self.shares[region].take();
        share.unwrap_or_else(|| self.pool.take(data.own(region).len()))
    }

    /// Drops the open step.
    pub(crate) fn clear(&mut self) {
        self.local.clear();
        self.shares.fill_with(|| None);
    }

    /// Ends a pass: adds what its reduction received.
    pub(crate) fn absorb(&mut self, processor: &Processor, slots: Slots) {
        for (region, received) in slots.into_received() {
            match &mut self.shares[region] {
                Some(share) => elementwise::add_assign(processor, share, &received),
                share => *share = Some(received),
            }
        }
    }

    /// Most bytes held at once.
    pub(crate) fn num_bytes(&self) -> u64 {
        self.pool.peak_bytes()
    }
}

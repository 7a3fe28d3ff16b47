//! The open step's gradients: this rank's own sums, and its shares of the sums over replicas.

use drivetrain_core::Result;
use drivetrain_kernels::{Memory, Processor, ops::elementwise};

use super::{DataParallel, Slots};
use crate::weights::{Buffers, Layout};

/// Gradients of one rank.
///
/// Of a region with replicas, `local` is of no account between calls and a share holds what was reduced; of a
/// region that this rank holds alone, `local` is all.
#[derive(Debug)]
pub(crate) struct Gradients {
    /// What backward writes.
    pub(crate) local: Buffers,
    /// Whether `local` counts as 0, whatever it holds: the next backward then overwrites it, which saves a
    /// pass over memory that clears it and one that reads the zeros.
    blank: bool,
    /// Whether the regions with replicas count as 0 in `local`, the others not.
    reduced: bool,
    /// Of each region, the share this rank owns. Empty where it holds the region alone.
    shares: Vec<Memory>,
    /// Whether `forward_backward` has run since the last clear.
    open: bool,
}

impl Gradients {
    /// None yet.
    pub(crate) fn new(layout: &Layout, data: &DataParallel, processor: &Processor) -> Self {
        let share = |region| match data.is_alone(region) {
            true => Memory::default(),
            false => processor.zeros(data.own(region).len()),
        };
        Self {
            local: Buffers::zeros(layout, processor),
            blank: true,
            reduced: false,
            shares: (0..data.num_regions()).map(share).collect(),
            open: false,
        }
    }

    /// Called before a pass, which has a gradient if `any`: whether its first micro-batch with a gradient adds to
    /// `local`, or overwrites it. Where no micro-batch will, the zeros are made real.
    pub(crate) fn start(&mut self, data: &DataParallel, any: bool) -> bool {
        let blank = std::mem::replace(&mut self.blank, false);
        if blank && !any {
            self.local.clear();
        }
        if std::mem::replace(&mut self.reduced, false) && !blank {
            for region in (0..data.num_regions()).filter(|&r| !data.is_alone(r)) {
                let region = data.region(region);
                self.local.bucket_mut(region.bucket)[region.range.clone()].fill(0.0);
            }
        }
        !blank
    }

    /// This rank's share of a region, summed over its replicas.
    pub(crate) fn own(&self, data: &DataParallel, region: usize) -> &[f32] {
        match data.is_alone(region) {
            false => &self.shares[region],
            true => &self.local.bucket(data.region(region).bucket)[data.own(region)],
        }
    }

    /// Drops the open step.
    pub(crate) fn clear(&mut self) {
        self.blank = true;
        self.open = false;
    }

    /// Ends a pass: takes back the buckets that its reduction borrowed and, if that went well, adds what it
    /// received and opens the step.
    ///
    /// # Errors
    /// The reduction's.
    pub(crate) fn absorb(
        &mut self,
        processor: &Processor,
        data: &DataParallel,
        slots: Slots,
        reduced: Result<()>,
    ) -> Result<()> {
        for (bucket, sums, received) in slots.into_started() {
            *self.local.bucket_mut(bucket) = sums;
            for (region, received) in data.buckets[bucket].clone().zip(received) {
                let Some(received) = received else { continue };
                let share = &mut self.shares[region];
                if self.open {
                    elementwise::add_assign(processor, share, &received);
                } else {
                    share.copy_from_slice(&received);
                }
            }
        }
        reduced?;
        self.open = true;
        self.reduced = true;
        self.blank = (0..data.num_regions()).all(|r| !data.is_alone(r));
        Ok(())
    }

    /// Bytes held.
    pub(crate) fn num_bytes(&self) -> u64 {
        let shares: usize = self.shares.iter().map(|s| s.len() * size_of::<f32>()).sum();
        self.local.num_bytes() + shares as u64
    }
}

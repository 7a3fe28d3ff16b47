//! The open step's gradients: this rank's own sums, and its share of the sums over ranks.

use drivetrain_core::Result;
use drivetrain_kernels::{Cpu, ops::elementwise};

use super::{DataParallel, Slot};
use crate::weights::{Buffers, Layout};

/// Gradients of one rank.
///
/// Over several ranks `local` is 0 between calls and `shares` hold what was reduced; alone, `local` is all.
#[derive(Debug)]
pub(crate) struct Gradients {
    /// What backward adds to.
    pub(crate) local: Buffers,
    /// Of each bucket, the share this rank owns. Empty where it is alone.
    shares: Vec<Vec<f32>>,
    /// Whether `forward_backward` has run since the last clear.
    open: bool,
}

impl Gradients {
    /// Zeros.
    pub(crate) fn new(layout: &Layout, data: &DataParallel) -> Self {
        let shares = match data.size() {
            1 => Vec::new(),
            _ => (0..data.num_buckets())
                .map(|b| vec![0.0; data.own(b).len()])
                .collect(),
        };
        Self {
            local: Buffers::zeros(layout),
            shares,
            open: false,
        }
    }

    /// Whether a step is open.
    pub(crate) fn is_open(&self) -> bool {
        self.open
    }

    /// This rank's share of a bucket, summed over ranks.
    pub(crate) fn own(&self, data: &DataParallel, bucket: usize) -> &[f32] {
        match self.shares.get(bucket) {
            Some(share) => share,
            None => &self.local.bucket(bucket)[data.own(bucket)],
        }
    }

    /// Drops the open step.
    pub(crate) fn clear(&mut self) {
        self.local.clear();
        for share in &mut self.shares {
            share.fill(0.0);
        }
        self.open = false;
    }

    /// Ends a backward pass: takes back the buckets that its reduction borrowed and, if that went well, adds
    /// what it received and opens the step. Alone there is nothing to take back.
    ///
    /// # Errors
    /// The reduction's.
    pub(crate) fn absorb(&mut self, cpu: Cpu, slots: Vec<Slot>, reduced: Result<()>) -> Result<()> {
        for slot in slots {
            let Some(bucket) = slot.bucket else { continue };
            if reduced.is_ok() {
                elementwise::add_assign(cpu, &mut self.shares[bucket], &slot.received);
            }
            *self.local.bucket_mut(bucket) = slot.local;
            self.local.bucket_mut(bucket).fill(0.0);
        }
        reduced?;
        self.open = true;
        Ok(())
    }

    /// Bytes held.
    pub(crate) fn num_bytes(&self) -> u64 {
        let shares: usize = self.shares.iter().map(|s| s.len() * size_of::<f32>()).sum();
        self.local.num_bytes() + shares as u64
    }
}

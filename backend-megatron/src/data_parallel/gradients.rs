//! The open step's gradients: this rank's own sums, and its share of the sums over ranks.

use drivetrain_core::Result;
use drivetrain_kernels::{Cpu, ops::elementwise};

use super::{DataParallel, Slot};
use crate::weights::{Buffers, Layout};

/// Gradients of one rank.
///
/// Over several ranks `local` is blank between calls and `shares` hold what was reduced; alone, `local` is all.
#[derive(Debug)]
pub(crate) struct Gradients {
    /// What backward writes.
    pub(crate) local: Buffers,
    /// Whether `local` counts as 0, whatever it holds: the next backward then overwrites it, which saves a
    /// pass over memory that clears it and one that reads the zeros.
    blank: bool,
    /// Of each bucket, the share this rank owns. Empty where it is alone.
    shares: Vec<Vec<f32>>,
    /// Whether `forward_backward` has run since the last clear.
    open: bool,
}

impl Gradients {
    /// None yet.
    pub(crate) fn new(layout: &Layout, data: &DataParallel) -> Self {
        let shares = match data.size() {
            1 => Vec::new(),
            _ => (0..data.num_buckets())
                .map(|b| vec![0.0; data.own(b).len()])
                .collect(),
        };
        Self {
            local: Buffers::zeros(layout),
            blank: true,
            shares,
            open: false,
        }
    }

    /// Called once for each micro-batch that has a gradient, in order: whether it adds to `local`, or is the
    /// first and overwrites it.
    pub(crate) fn start_microbatch(&mut self) -> bool {
        !std::mem::replace(&mut self.blank, false)
    }

    /// Called before the reduction: where no micro-batch had a gradient, makes the zeros real.
    pub(crate) fn settle(&mut self) {
        if std::mem::replace(&mut self.blank, false) {
            self.local.clear();
        }
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
        self.blank = true;
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
            *self.local.bucket_mut(bucket) = slot.local;
            self.blank = true;
            let share = &mut self.shares[bucket];
            if self.open {
                elementwise::add_assign(cpu, share, &slot.received);
            } else {
                share.copy_from_slice(&slot.received);
            }
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

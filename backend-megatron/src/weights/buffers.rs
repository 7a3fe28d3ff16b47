//! One value for every element that a rank holds, bucket by bucket.

use std::{
    cell::{OnceCell, RefCell},
    ops::Range,
};

use drivetrain_core::{
    Error, ErrorKind, Result,
    communicator::{Shared, Work},
    optim,
};
use drivetrain_kernels::{Memory, Processor};

use super::{Layout, TensorRef};
use crate::workspace::{Buffer, Workspace};

/// Weights, or whole gradients on their way out.
///
/// Parts of a bucket may still be coming from the ranks that own them, while others are in use: whoever needs a bucket
/// settles it first.
#[derive(Debug)]
pub(crate) struct Buffers(Vec<Bucket>);

#[derive(Debug)]
struct Bucket {
    /// Not there while some of it is coming.
    values: OnceCell<Memory>,
    coming: RefCell<Option<Coming>>,
}

/// What the owners of a bucket's parts send.
#[derive(Debug)]
pub(crate) struct Coming {
    values: Memory,
    parts: Vec<(Range<usize>, Work<'static, Vec<Shared>>)>,
    /// The optimizer step that they belong to, which a failure leaves half done.
    committed: Option<u64>,
}

impl Buffers {
    /// Zeros.
    pub(crate) fn zeros(layout: &Layout, processor: &Processor) -> Self {
        let zeros = |len| Bucket {
            values: processor.zeros(len).into(),
            coming: RefCell::default(),
        };
        Self(layout.buckets().iter().map(|b| zeros(b.len())).collect())
    }

    /// A copy; no bucket is coming.
    pub(crate) fn duplicate(&self) -> Self {
        let copy = |bucket: &Bucket| Bucket {
            values: bucket.values.clone(),
            coming: RefCell::default(),
        };
        Self(self.0.iter().map(copy).collect())
    }

    /// A tensor of a settled bucket.
    pub(crate) fn get(&self, tensor: &TensorRef) -> &[f32] {
        &self.bucket(tensor.bucket)[tensor.range.clone()]
    }

    /// A settled bucket.
    pub(crate) fn bucket(&self, index: usize) -> &[f32] {
        let values = self.0[index].values.get();
        values.expect("a bucket is settled before it is used")
    }

    /// A settled bucket, to write.
    pub(crate) fn bucket_mut(&mut self, index: usize) -> &mut [f32] {
        let values = self.0[index].values.get_mut();
        values.expect("a bucket is settled before it is used")
    }

    /// Starts on a bucket of which parts are coming.
    pub(crate) fn receive(
        &mut self,
        index: usize,
        parts: Vec<(Range<usize>, Work<'static, Vec<Shared>>)>,
        committed: Option<u64>,
    ) {
        let bucket = &mut self.0[index];
        if let Some(values) = bucket.values.take() {
            bucket.coming = RefCell::new(Some(Coming {
                values,
                parts,
                committed,
            }));
        }
    }

    /// Waits for what is coming of a bucket.
    ///
    /// # Errors
    /// The communicator's; `Poisoned` where it leaves an optimizer step half done.
    pub(crate) fn settle(&self, index: usize) -> Result<()> {
        let bucket = &self.0[index];
        let Some(mut coming) = bucket.coming.take() else {
            return Ok(());
        };
        let outcome = coming.finish();
        bucket.values.set(coming.values).map_err(|_| {
            let message = "a bucket was there while parts of it were coming";
            Error::new(ErrorKind::Defect, "all_gather", message)
        })?;
        match coming.committed {
            Some(step) => optim::committed(step, outcome),
            None => outcome,
        }
    }

    /// Waits for what is coming of all buckets.
    ///
    /// # Errors
    /// As [`Self::settle`].
    pub(crate) fn settle_all(&self) -> Result<()> {
        (0..self.0.len()).try_for_each(|index| self.settle(index))
    }

    /// Bytes it takes.
    pub(crate) fn num_bytes(&self) -> u64 {
        let len = |bucket: &Bucket| match bucket.values.get() {
            Some(values) => values.len(),
            None => bucket
                .coming
                .borrow()
                .as_ref()
                .map_or(0, |c| c.values.len()),
        };
        let elements: usize = self.0.iter().map(len).sum();
        (elements * size_of::<f32>()) as u64
    }
}

impl Coming {
    fn finish(&mut self) -> Result<()> {
        for (range, work) in self.parts.drain(..) {
            let mut at = range.start;
            for part in work.wait()? {
                let part = part.as_view();
                let part = part.as_f32()?;
                self.values[at..at + part.len()].copy_from_slice(part);
                at += part.len();
            }
        }
        Ok(())
    }
}

/// Sums of gradients that backward writes. A bucket takes memory from its first write until it is given away.
#[derive(Debug)]
pub(crate) struct Sums {
    buckets: Vec<Option<Buffer>>,
    lens: Vec<usize>,
    pool: Workspace,
}

impl Sums {
    /// Nothing written.
    pub(crate) fn new(layout: &Layout, pool: Workspace) -> Self {
        let lens: Vec<_> = layout.buckets().iter().map(|b| b.len()).collect();
        Self {
            buckets: lens.iter().map(|_| None).collect(),
            lens,
            pool,
        }
    }

    /// A tensor, to write. Until it is written it holds anything.
    pub(crate) fn get_mut(&mut self, tensor: &TensorRef) -> &mut [f32] {
        let index = tensor.bucket;
        let bucket = &mut self.buckets[index];
        let values = bucket.get_or_insert_with(|| self.pool.take(self.lens[index]));
        &mut values[tensor.range.clone()]
    }

    /// A bucket's sums, which leave; zeros where nothing was written.
    pub(crate) fn give(&mut self, index: usize) -> Buffer {
        let written = self.buckets[index].take();
        written.unwrap_or_else(|| self.pool.zeros(self.lens[index]))
    }

    /// Drops what was written.
    pub(crate) fn clear(&mut self) {
        self.buckets.fill_with(|| None);
    }
}

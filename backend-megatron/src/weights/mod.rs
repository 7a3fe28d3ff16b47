//! Weights in the engine's own layout, and their way in and out under Hugging Face names.

mod layout;
mod transfer;

pub(crate) use layout::{Layout, LayoutBuilder, Region, TensorRef};
pub(crate) use transfer::{export, import};

use drivetrain_core::moe::ExpertBias;
use drivetrain_kernels::{Memory, Processor};

/// What computes: weights, and what is no weight but comes with them.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Policy {
    pub(crate) params: Buffers,
    /// The selection bias of experts.
    pub(crate) bias: ExpertBias,
}

/// One value for every element of every bucket: weights, gradients, or a snapshot.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Buffers(Vec<Memory>);

impl Buffers {
    /// Zeros.
    pub(crate) fn zeros(layout: &Layout, processor: &Processor) -> Self {
        let buckets = layout.buckets().iter();
        Self(buckets.map(|b| processor.zeros(b.len())).collect())
    }

    /// A tensor.
    pub(crate) fn get(&self, tensor: &TensorRef) -> &[f32] {
        &self.0[tensor.bucket][tensor.range.clone()]
    }

    /// A tensor, to write.
    pub(crate) fn get_mut(&mut self, tensor: &TensorRef) -> &mut [f32] {
        &mut self.0[tensor.bucket][tensor.range.clone()]
    }

    /// A bucket.
    pub(crate) fn bucket(&self, index: usize) -> &[f32] {
        &self.0[index]
    }

    /// A bucket, to write.
    pub(crate) fn bucket_mut(&mut self, index: usize) -> &mut Memory {
        &mut self.0[index]
    }

    /// All buckets, to write.
    pub(crate) fn buckets_mut(&mut self) -> impl Iterator<Item = &mut [f32]> {
        self.0.iter_mut().map(|bucket| &mut **bucket)
    }

    /// Sets every element to 0.
    pub(crate) fn clear(&mut self) {
        for bucket in &mut self.0 {
            bucket.fill(0.0);
        }
    }

    /// Bytes it takes.
    pub(crate) fn num_bytes(&self) -> u64 {
        self.0
            .iter()
            .map(|b| (b.len() * size_of::<f32>()) as u64)
            .sum()
    }
}

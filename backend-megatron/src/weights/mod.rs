//! Weights in the engine's own layout, and their way in and out under Hugging Face names.

mod buffers;
mod layout;
mod transfer;

pub(crate) use buffers::{Buffers, Sums};
pub(crate) use layout::{Layout, LayoutBuilder, Region, TensorRef};
pub(crate) use transfer::{export, import};

use drivetrain_core::moe::ExpertBias;

/// What computes: weights, and what is no weight but comes with them.
#[derive(Debug)]
pub(crate) struct Policy {
    pub(crate) params: Buffers,
    /// The selection bias of experts.
    pub(crate) bias: ExpertBias,
}

impl Policy {
    /// A copy; no weights are coming.
    pub(crate) fn duplicate(&self) -> Self {
        Self {
            params: self.params.duplicate(),
            bias: self.bias.clone(),
        }
    }
}

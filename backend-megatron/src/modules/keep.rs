//! What one layer keeps from forward to backward: which activations, and in which dtype.
//!
//! Forward computes with f32 values whatever is kept, so that storage changes no output. Rounded to bf16, a kept value
//! is off by at most 2^-8 of itself, and backward, which is f32 arithmetic again, sees that. What few numbers say of
//! many others stays exact: log-sum-exps, of which backward makes every probability of attention again, a norm's
//! factors, and all that a router has decided.

use drivetrain_core::{
    DType,
    config::{JobConfig, RecomputeModule},
};
use drivetrain_kernels::ops::elementwise;
use half::bf16;

use super::Context;
use crate::workspace::{Buffer, Lent};

/// A layer's choice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Keep {
    modules: Vec<RecomputeModule>,
    /// Nothing but its input; all else is computed again.
    pub(super) full: bool,
    rounded: bool,
}

/// An activation on its way to backward.
#[derive(Debug)]
pub(crate) enum Kept {
    /// As it was computed.
    F32(Buffer),
    /// Rounded.
    Bf16(Lent<bf16>),
}

impl Keep {
    /// What a job says of layer `index`.
    ///
    /// A layer of which all is computed again keeps its input in f32: from another input its experts could be other
    /// ones the second time.
    pub(crate) fn of_layer(config: &JobConfig, index: usize) -> Self {
        let full = index < config.recompute.full_layers;
        let dtype = config.precision.saved_activations;
        Self {
            modules: config.recompute.modules.clone(),
            full,
            rounded: dtype == Some(DType::Bf16) && !full,
        }
    }

    /// Whether the output of such a module is dropped, and computed again.
    pub(super) fn drops(&self, module: RecomputeModule) -> bool {
        self.modules.contains(&module)
    }

    /// Keeps an activation that forward is done with.
    pub(super) fn keep(&self, cx: &Context<'_>, x: Buffer) -> Kept {
        match self.rounds(cx) {
            true => Kept::rounded(cx, &x),
            false => Kept::F32(x),
        }
    }

    /// The same, unless such a module's are dropped.
    pub(super) fn keep_of(
        &self,
        module: RecomputeModule,
        cx: &Context<'_>,
        x: Buffer,
    ) -> Option<Kept> {
        (!self.drops(module)).then(|| self.keep(cx, x))
    }

    /// Keeps an activation that forward goes on to change: the two.
    pub(super) fn fork(&self, cx: &Context<'_>, x: Buffer) -> (Kept, Buffer) {
        match self.rounds(cx) {
            true => (Kept::rounded(cx, &x), x),
            false => {
                let copy = cx.workspace.copy(&x);
                (Kept::F32(x), copy)
            }
        }
    }

    /// Bytes of so many kept elements.
    pub(super) fn bytes(&self, elements: usize) -> usize {
        elements
            * match self.rounded {
                true => size_of::<bf16>(),
                false => size_of::<f32>(),
            }
    }

    /// Where nothing is trained nothing is kept for long.
    fn rounds(&self, cx: &Context<'_>) -> bool {
        self.rounded && cx.router.is_some()
    }
}

impl Kept {
    fn rounded(cx: &Context<'_>, x: &[f32]) -> Self {
        let mut rounded = cx.workspace.take_of::<bf16>(x.len());
        elementwise::f32_to_bf16(cx.cpu, x, &mut rounded);
        Self::Bf16(rounded)
    }

    /// For backward, which computes in f32.
    pub(super) fn widen(self, cx: &Context<'_>) -> Buffer {
        match self {
            Self::F32(x) => x,
            Self::Bf16(rounded) => {
                let mut x = cx.workspace.take(rounded.len());
                elementwise::bf16_to_f32(cx.cpu, &rounded, &mut x);
                x
            }
        }
    }
}

//! The modules of a transformer, each with a `forward` that returns its output and what backward needs, a
//! `backward` that adds to the gradients, and a `plan` that says what the two do.

mod attention;
mod block;
mod embedding;
mod head;
mod head_norms;
mod linear;
mod mlp;
mod norm;
mod recompute;

pub(crate) use block::{Block, SavedBlock};
pub(crate) use embedding::Embedding;
pub(crate) use head::{Head, HeadGradients, HeadOutputs, HeadRequest, SavedHead};
pub(crate) use recompute::Recompute;

use std::borrow::Cow;

use drivetrain_core::{Result, model::ModelSpec, plan::PlannedOp};
use drivetrain_kernels::Cpu;

use crate::{
    packed::Packed,
    ranks::Ranks,
    tensor_parallel::Gathered,
    workspace::{Buffer, Workspace},
};

/// How to compute, where buffers come from, the micro-batch, and the ranks that share the work.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Context<'a> {
    /// Instruction set and threads.
    pub(crate) cpu: Cpu,
    /// Activations and scratch.
    pub(crate) workspace: &'a Workspace,
    /// The tokens.
    pub(crate) packed: &'a Packed,
    /// cos and sin for every position that occurs.
    pub(crate) rope: &'a RopeTables,
    /// Groups of ranks.
    pub(crate) ranks: &'a Ranks,
    /// Whether backward adds to the gradients, or is the first of its step and overwrites them.
    pub(crate) accumulate: bool,
}

impl Context<'_> {
    /// All T rows of the residual stream's x [S, W].
    fn gather<'x>(&self, x: &'x [f32], width: usize) -> Result<Gathered<'x>> {
        let rows = (self.packed.shares.as_slice(), width);
        self.ranks.tensor.gather(self.workspace, x, rows)
    }

    /// Of the sum over tensor ranks of `partial` [T, W] this rank's S rows.
    fn reduce(&self, partial: Buffer, width: usize) -> Result<Buffer> {
        let rows = (self.packed.shares.as_slice(), width);
        self.ranks.tensor.reduce(self.workspace, partial, rows)
    }

    /// S: this rank's rows of the residual stream.
    pub(crate) fn num_rows(&self) -> usize {
        let tensor = self.ranks.tensor.shape;
        match tensor.sequence {
            true => self.packed.shares[tensor.index],
            false => self.packed.num_tokens(),
        }
    }

    /// Which of these rows are scored, `[M]`.
    fn own_scored_rows(&self) -> Cow<'_, [u32]> {
        let tensor = self.ranks.tensor.shape;
        if !tensor.sequence {
            return Cow::Borrowed(&self.packed.rows);
        }
        let before = |shares: &[usize]| shares[..tensor.index].iter().sum::<usize>();
        let first = before(&self.packed.shares) as u32;
        let scored = before(&self.packed.scored_shares);
        let own = scored..scored + self.packed.scored_shares[tensor.index];
        let rows = self.packed.rows[own].iter();
        Cow::Owned(rows.map(|row| row - first).collect())
    }

    /// Adds them to y [S, W].
    fn reduce_add(&self, partial: Buffer, width: usize, y: &mut [f32]) -> Result<()> {
        let sum = self.reduce(partial, width)?;
        drivetrain_kernels::ops::elementwise::add_assign(self.cpu, y, &sum);
        Ok(())
    }
}

/// cos and sin, each `[positions, E / 2]`.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct RopeTables {
    /// Cosines.
    pub(crate) cos: Vec<f32>,
    /// Sines.
    pub(crate) sin: Vec<f32>,
}

impl RopeTables {
    /// Grows the tables to cover positions below `length`, at least doubling them.
    pub(crate) fn cover(&mut self, model: &ModelSpec, length: usize) {
        let half = model.head_dim / 2;
        if half == 0 || length * half <= self.cos.len() {
            return;
        }
        let positions = length.max(2 * self.cos.len() / half);
        (self.cos, self.sin) = model.rope.tables(model.head_dim, positions);
    }
}

/// An operation for the plan.
fn planned(kind: &str, module: String, [m, n, k]: [usize; 3], saved_elements: usize) -> PlannedOp {
    PlannedOp {
        kind: kind.to_owned(),
        module,
        m,
        n,
        k,
        saved_bytes: (saved_elements * size_of::<f32>()) as u64,
    }
}

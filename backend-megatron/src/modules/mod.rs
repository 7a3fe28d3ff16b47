//! The modules of a transformer, each with a `forward` that returns its output and what backward needs, a
//! `backward` that adds to the gradients, and a `plan` that says what the two do.

mod attention;
mod block;
mod embedding;
mod head;
mod head_norms;
mod keep;
mod linear;
mod mlp;
mod moe;
mod norm;
mod router;
mod swiglu;

pub(crate) use block::{Block, SavedBlock};
pub(crate) use embedding::Embedding;
pub(crate) use head::{Head, HeadGradients, HeadOutputs, HeadRequest, SavedHead};
pub(crate) use router::{RouterGoal, RouterTally};

use keep::{Keep, Kept};

use std::{borrow::Cow, ops::Range};

use drivetrain_core::{Result, model::ModelSpec, moe::ExpertBias, plan::PlannedOp};
use drivetrain_kernels::{Memory, On, Processor, ops::elementwise};

use crate::{
    packed::Packed,
    ranks::Ranks,
    sequence_parallel,
    tensor_parallel::Gathered,
    workspace::{Buffer, Workspace},
};

/// How to compute, where buffers come from, the micro-batch, and the ranks that share the work.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Context<'a> {
    /// A CPU's instruction set and threads, or a device.
    pub(crate) cpu: On<'a>,
    /// Activations and scratch.
    pub(crate) workspace: &'a Workspace,
    /// The tokens.
    pub(crate) packed: &'a Packed,
    /// cos and sin for every position that occurs.
    pub(crate) rope: &'a RopeTables,
    /// Groups of ranks.
    pub(crate) ranks: &'a Ranks,
    /// The selection bias of experts.
    pub(crate) bias: &'a ExpertBias,
    /// What routers are trained by; `None` where nothing is trained.
    pub(crate) router: Option<RouterGoal<'a>>,
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

    /// Adds them to y [S, W].
    fn reduce_add(&self, partial: Buffer, width: usize, y: &mut [f32]) -> Result<()> {
        let sum = self.reduce(partial, width)?;
        elementwise::add_assign(self.cpu, y, &sum);
        Ok(())
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

    /// Of the T rows those that no other tensor rank has.
    fn distinct_rows(&self) -> Range<usize> {
        let (shares, index) = (&self.packed.shares, self.ranks.tensor.shape.index);
        let start = shares[..index].iter().sum();
        start..start + shares[index]
    }

    /// Whether no other tensor rank has a row of the residual stream that this one has.
    fn has_distinct_rows(&self) -> bool {
        self.ranks.tensor.shape.sequence || self.ranks.tensor.is_alone()
    }

    /// These of x [S, W].
    fn distinct<'x>(&self, x: &'x [f32], width: usize) -> &'x [f32] {
        let rows = self.distinct_rows();
        match self.has_distinct_rows() {
            true => x,
            false => &x[rows.start * width..rows.end * width],
        }
    }

    /// All T rows of what each tensor rank has of its own.
    fn join(&self, own: &[f32], width: usize) -> Result<Buffer> {
        let rows = (self.packed.shares.as_slice(), width);
        sequence_parallel::gather(self.ranks.tensor.group(), self.workspace, own, rows)
    }

    /// Nothing counted yet.
    fn tally(&self) -> RouterTally {
        self.router
            .map_or_else(RouterTally::default, |goal| goal.tally())
    }
}

/// cos and sin, each `[positions, E / 2]`.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct RopeTables {
    /// Cosines.
    pub(crate) cos: Memory,
    /// Sines.
    pub(crate) sin: Memory,
}

impl RopeTables {
    /// Grows the tables to cover positions below `length`, at least doubling them.
    pub(crate) fn cover(&mut self, processor: &Processor, model: &ModelSpec, length: usize) {
        let half = model.head_dim / 2;
        if half == 0 || length * half <= self.cos.len() {
            return;
        }
        let positions = length.max(2 * self.cos.len() / half);
        let (cos, sin) = model.rope.tables(model.head_dim, positions);
        (self.cos, self.sin) = (processor.adopt(cos), processor.adopt(sin));
    }
}

/// An operation for the plan.
fn planned(kind: &str, module: String, [m, n, k]: [usize; 3], saved_bytes: usize) -> PlannedOp {
    PlannedOp {
        kind: kind.to_owned(),
        module,
        m,
        n,
        k,
        saved_bytes: saved_bytes as u64,
    }
}

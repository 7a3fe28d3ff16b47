//! The way of rows to their experts and back.
//!
//! A rank's rows are sorted by expert, exchanged among the expert ranks (all-to-all, as many as there are: no
//! expert has a capacity), gathered among the expert-tensor ranks, which each hold a part of the same experts, and
//! sorted again by expert. Back, the parts' results are summed by a reduce-scatter and exchanged the other way. The
//! gradient takes the same two ways.

use std::ops::Range;

use drivetrain_core::{Result, communicator::ReduceOp};
use drivetrain_kernels::ops::permute::{self, Order, PermuteDims};

use super::ExpertParallel;
use crate::{
    modules::Context,
    workspace::{Buffer, Lent, Workspace},
};

/// Where the rows of one layer and micro-batch go.
#[derive(Debug)]
pub(crate) struct Dispatch {
    /// This rank's slots, by expert.
    own: Sorted,
    /// Rows that go to each expert rank.
    sent: Vec<usize>,
    /// Rows that come from each.
    received: Vec<usize>,
    /// Rows that each expert-tensor rank received.
    gathered: Vec<usize>,
    /// All these, by expert; `None` where this rank holds all experts whole, and they are its own.
    arrived: Option<Sorted>,
    width: usize,
}

/// A sorting of rows by expert.
#[derive(Debug)]
struct Sorted {
    slots: Lent<u32>,
    rows: Lent<u32>,
    /// Expert e has the rows `offsets[e]..offsets[e + 1]`.
    offsets: Vec<usize>,
}

impl Sorted {
    fn new(workspace: &Workspace, experts: &[u32], num_experts: usize) -> Self {
        let mut sorted = Self {
            slots: workspace.take_of(experts.len()),
            rows: workspace.take_of(experts.len()),
            offsets: vec![0; num_experts + 1],
        };
        let Self {
            slots,
            rows,
            offsets,
        } = &mut sorted;
        permute::sort(experts, offsets, slots, rows);
        sorted
    }

    fn order(&self) -> Order<'_> {
        Order {
            slots: &self.slots,
            rows: &self.rows,
        }
    }

    /// Rows of each expert.
    fn counts(&self) -> impl Iterator<Item = usize> {
        self.offsets.windows(2).map(|ends| ends[1] - ends[0])
    }
}

impl Dispatch {
    /// For slots that chose `experts`, rows of `width` elements. Collective over the ranks that hold the experts.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn new(
        (ranks, workspace): (&ExpertParallel, &Workspace),
        experts: &[u32],
        num_experts: usize,
        width: usize,
    ) -> Result<Self> {
        let own = Sorted::new(workspace, experts, num_experts);
        if ranks.is_alone() {
            return Ok(Self {
                sent: vec![experts.len()],
                received: vec![experts.len()],
                gathered: vec![experts.len()],
                own,
                arrived: None,
                width,
            });
        }
        let counts: Vec<i64> = own.counts().map(|n| n as i64).collect();
        let lens = vec![num_experts; ranks.all.world_size()];
        let mut all = vec![0_i64; num_experts * lens.len()];
        ranks
            .all
            .all_gather((&counts).into(), (&mut all).into(), &lens)?
            .wait()?;
        let shape = ranks.shape;
        let of = |expert_rank: usize, tensor_rank: usize, expert: usize| {
            all[(expert_rank * shape.tensor_ranks + tensor_rank) * num_experts + expert] as usize
        };
        let mine = shape.experts(num_experts);
        let from = |expert_rank, tensor_rank| -> usize {
            mine.clone().map(|e| of(expert_rank, tensor_rank, e)).sum()
        };
        let sent = |to| {
            let theirs: Range<usize> = shape.experts_of(to, num_experts);
            own.offsets[theirs.end] - own.offsets[theirs.start]
        };
        // As they lie once gathered: by expert-tensor rank, by expert rank, by expert.
        let came = |t| (0..shape.ranks).map(|e| from(e, t)).sum::<usize>();
        let mut arrived = workspace.take_of::<u32>((0..shape.tensor_ranks).map(came).sum());
        let mut at = 0;
        for t in 0..shape.tensor_ranks {
            for e in 0..shape.ranks {
                for x in mine.clone() {
                    let end = at + of(e, t, x);
                    arrived[at..end].fill((x - mine.start) as u32);
                    at = end;
                }
            }
        }
        Ok(Self {
            sent: (0..shape.ranks).map(sent).collect(),
            received: (0..shape.ranks)
                .map(|e| from(e, shape.tensor_rank))
                .collect(),
            gathered: (0..shape.tensor_ranks).map(came).collect(),
            arrived: Some(Sorted::new(workspace, &arrived, mine.len())),
            own,
            width,
        })
    }

    /// This rank's slots in the order in which [`Self::scatter`] takes them.
    pub(crate) fn order(&self) -> Order<'_> {
        self.own.order()
    }

    /// Rows of each of this rank's experts, as [`Self::scatter`] brings them.
    pub(crate) fn offsets(&self) -> &[usize] {
        &self.arrived.as_ref().unwrap_or(&self.own).offsets
    }

    /// This rank's sorted rows to their experts: all rows that came for the experts that it holds.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn scatter(&self, cx: &Context<'_>, rows: Buffer) -> Result<Buffer> {
        let (Some(ranks), Some(arrived)) = (&cx.ranks.experts, &self.arrived) else {
            return Ok(rows);
        };
        let came = self.exchange(cx, ranks, rows, &self.sent, &self.received)?;
        let counts = self.elements(&self.gathered);
        let mut all = cx.workspace.take(counts.iter().sum());
        ranks
            .tensor
            .all_gather(came.give(), (&mut *all).into(), &counts)?
            .wait()?;
        let mut sorted = cx.workspace.take(all.len());
        let dims = self.dims();
        permute::permute(cx.cpu, &dims, &arrived.order(), &all, &mut sorted);
        Ok(sorted)
    }

    /// Results of this rank's experts, a part each of the expert-tensor ranks, back to the ranks whose rows they are,
    /// summed.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn combine(&self, cx: &Context<'_>, rows: Buffer) -> Result<Buffer> {
        let (Some(ranks), Some(arrived)) = (&cx.ranks.experts, &self.arrived) else {
            return Ok(rows);
        };
        let mut parts = cx.workspace.take(rows.len());
        let (dims, order) = (self.dims(), arrived.order());
        permute::permute_backward(cx.cpu, &dims, &order, &rows, false, &mut parts);
        drop(rows);
        let counts = self.elements(&self.gathered);
        let mut own = cx.workspace.take(counts[ranks.shape.tensor_rank]);
        ranks
            .tensor
            .reduce_scatter(parts.give(), (&mut *own).into(), &counts, ReduceOp::Sum)?
            .wait()?;
        self.exchange(cx, ranks, own, &self.received, &self.sent)
    }

    fn exchange(
        &self,
        cx: &Context<'_>,
        ranks: &ExpertParallel,
        rows: Buffer,
        sent: &[usize],
        received: &[usize],
    ) -> Result<Buffer> {
        if ranks.shape.ranks == 1 {
            return Ok(rows);
        }
        let (sent, received) = (self.elements(sent), self.elements(received));
        let mut came = cx.workspace.take(received.iter().sum());
        ranks
            .experts
            .all_to_all(rows.give(), &sent, (&mut *came).into(), &received)?
            .wait()?;
        Ok(came)
    }

    fn elements(&self, rows: &[usize]) -> Vec<usize> {
        rows.iter().map(|n| n * self.width).collect()
    }

    /// A permutation of the rows that arrived.
    fn dims(&self) -> PermuteDims {
        PermuteDims {
            tokens: self.gathered.iter().sum(),
            top_k: 1,
            width: self.width,
        }
    }
}

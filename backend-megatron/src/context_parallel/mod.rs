//! Context parallelism: ranks that hold parts of every sequence.
//!
//! A sequence is cut into twice as many chunks as there are ranks, as even as can be, and rank r has chunk r and
//! the r-th from the end: of the causal scores every rank then computes nearly as many (load balance). Attention
//! goes round a ring (Liu et al. 2023): each rank's keys and values pass by every rank.

mod ring;

pub(crate) use ring::{CoreShape, backward, forward};

use std::{ops::Range, sync::Arc};

use drivetrain_core::{
    Result,
    communicator::{Communicator, Input, ReduceOp, Shared, Work},
    mesh::{DeviceMesh, MeshAxis},
    objective::TokenOutputs,
    plan::share,
};

use crate::workspace::Buffer;

/// Which of how many context ranks this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ContextShape {
    pub(crate) size: usize,
    pub(crate) index: usize,
}

/// Neighbouring tokens of a sequence on one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Which sequence of the micro-batch.
    pub(crate) sequence: usize,
    /// Position of the first.
    pub(crate) start: usize,
    /// The rank's rows that hold them.
    pub(crate) rows: Range<usize>,
    /// Index in the micro-batch of the sequence's first token.
    offset: usize,
}

impl Piece {
    /// Their indices in the micro-batch.
    pub(crate) fn tokens(&self) -> Range<usize> {
        let first = self.offset + self.start;
        first..first + self.rows.len()
    }

    /// Their positions in the sequence.
    pub(crate) fn positions(&self) -> impl Iterator<Item = u32> + use<> {
        self.start as u32..(self.start + self.rows.len()) as u32
    }
}

impl ContextShape {
    /// That of a world rank.
    pub(crate) fn new(mesh: &DeviceMesh, rank: usize) -> Self {
        Self {
            size: mesh.context,
            index: mesh.coordinate(rank, MeshAxis::Context),
        }
    }

    /// What every rank has of sequences with these starts, none empty, in order.
    pub(crate) fn cut(&self, starts: &[usize]) -> Vec<Vec<Piece>> {
        (0..self.size)
            .map(|rank| self.pieces(starts, rank))
            .collect()
    }

    fn pieces(&self, starts: &[usize], rank: usize) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let mut rows = 0;
        for (sequence, ends) in starts.windows(2).enumerate() {
            let len = ends[1] - ends[0];
            let chunk = |index| share(len, 2 * self.size, index);
            let (front, back) = (chunk(rank), chunk(2 * self.size - 1 - rank));
            // On a rank that is alone the two are one.
            let parts = match front.end == back.start {
                true => [front.start..back.end, 0..0],
                false => [front, back],
            };
            for part in parts.into_iter().filter(|p| !p.is_empty()) {
                pieces.push(Piece {
                    sequence,
                    start: part.start,
                    rows: rows..rows + part.len(),
                    offset: ends[0],
                });
                rows += part.len();
            }
        }
        pieces
    }
}

/// The context ranks.
#[derive(Debug)]
pub(crate) struct ContextParallel {
    pub(crate) shape: ContextShape,
    group: Arc<dyn Communicator>,
}

impl ContextParallel {
    /// The group of this rank. Collective over `world`.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn new(
        world: &dyn Communicator,
        mesh: &DeviceMesh,
        shape: ContextShape,
    ) -> Result<Self> {
        let ranks = mesh.group(world.rank(), &[MeshAxis::Context])?;
        Ok(Self {
            shape,
            group: world.subgroup(&ranks, MeshAxis::Context.name())?,
        })
    }

    /// Whether there is one rank only.
    pub(crate) fn is_alone(&self) -> bool {
        self.shape.size == 1
    }

    /// Whose keys are here, step by step: this rank's own first, then those of the rank before it, and so on.
    fn ring(&self) -> impl Iterator<Item = usize> + use<> {
        let ContextShape { size, index } = self.shape;
        (0..size).map(move |step| (index + size - step) % size)
    }

    /// Whose keys come after those of `rank`.
    fn before(&self, rank: usize) -> usize {
        (rank + self.shape.size - 1) % self.shape.size
    }

    /// Whether the keys of `rank` are the last to come.
    fn is_last(&self, rank: usize) -> bool {
        self.before(rank) == self.shape.index
    }

    /// Starts to send to the next rank and to receive from the one before.
    fn pass<'a>(&self, leaving: &Arc<Buffer>, arriving: &'a mut [f32]) -> Result<Work<'a>> {
        let next = (self.shape.index + 1) % self.shape.size;
        let before = self.before(self.shape.index);
        let leaving = Input::Shared(Shared::new(leaving.clone()));
        self.group.exchange(leaving, next, arriving.into(), before)
    }

    /// Puts together what each rank has of its own tokens, 0 elsewhere: all of it on every rank.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn join(&self, outputs: &mut TokenOutputs) -> Result<()> {
        if self.is_alone() {
            return Ok(());
        }
        let mut all = vec![&mut outputs.log_probs];
        all.extend(outputs.entropy.as_mut());
        all.extend(outputs.log_probs_at.as_mut());
        for values in all {
            self.group
                .all_reduce(values.into(), ReduceOp::Sum)?
                .wait()?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_is_on_one_rank_and_ranks_are_balanced() {
        let starts = [0, 2, 19, 19, 83];
        for size in [1, 2, 3, 4] {
            let cut = ContextShape { size, index: 0 }.cut(&starts);
            let mut seen: Vec<_> = cut.iter().flatten().flat_map(Piece::tokens).collect();
            seen.sort_unstable();
            assert_eq!(seen, (0..83).collect::<Vec<_>>());
            let pairs = |rank: usize| -> usize {
                let of = |p: &Piece| p.positions().map(|p| p as usize + 1).sum::<usize>();
                cut[rank].iter().map(of).sum()
            };
            let whole: usize = (0..size).map(pairs).sum();
            assert!((0..size).all(|r| pairs(r).abs_diff(whole / size) <= whole / 10));
        }
    }

    #[test]
    fn a_rank_alone_has_every_sequence_in_one_piece() {
        let cut = ContextShape { size: 1, index: 0 }.cut(&[0, 5, 6]);
        let found: Vec<_> = cut[0].iter().map(|p| (p.start, p.rows.clone())).collect();
        assert_eq!(found, [(0, 0..5), (0, 5..6)]);
    }
}

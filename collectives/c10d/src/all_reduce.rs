//! A large all-reduce among more than two ranks: each reduces a part of it, then all gather the parts.

use std::sync::{Arc, Mutex};

use drivetrain_core::{
    Buffer, Result, ViewMut,
    communicator::{
        ReduceOp, Shared,
        transport::{Call, offset, reduce_in_rank_order},
    },
};

use crate::{
    exchange::{Exchange, Route},
    world::{Channel, World, lock},
};

/// Bytes up to which every rank sends all it has to every other: one stage, and as few bytes where there are two ranks.
const ONE_STAGE_BYTES: usize = 64 * 1024;

/// Whether it pays to reduce in two stages.
pub(crate) fn pays(ranks: usize, bytes: usize) -> bool {
    ranks > 2 && bytes > ONE_STAGE_BYTES
}

/// An all-reduce under way. It owns all its memory: others may wait for its second stage while this rank is elsewhere.
pub(crate) struct TwoStages {
    world: Arc<World>,
    channel: Arc<Channel>,
    call: Call,
    op: ReduceOp,
    counts: Vec<usize>,
    stage: Mutex<Stage>,
}

enum Stage {
    /// Every rank's contribution to this rank's part is coming.
    Reduce { exchange: Exchange, own: Shared },
    /// Every rank's reduced part is coming.
    Gather { exchange: Exchange, own: Shared },
    /// Its outcome has been taken, or is an error.
    Over(Result<()>),
}

impl TwoStages {
    pub(crate) fn begin(
        world: &Arc<World>,
        channel: &Arc<Channel>,
        call: Call,
        op: ReduceOp,
        own: Shared,
    ) -> Result<Arc<Self>> {
        let (rank, ranks) = (call.place.rank, call.place.members.len());
        let len = own.as_view().len();
        let counts: Vec<usize> = (0..ranks)
            .map(|r| len / ranks + usize::from(r < len % ranks))
            .collect();
        let mut exchange = Exchange::begin(world, channel, call.clone(), Route::default())?;
        for peer in (0..ranks).filter(|&peer| peer != rank) {
            let start = offset(&counts, peer);
            exchange.receive(peer, own.as_view().dtype(), counts[rank])?;
            exchange.send(peer, own.slice(start..start + counts[peer]))?;
        }
        let start = offset(&counts, rank);
        let own = own.slice(start..start + counts[rank]);
        let stages = Arc::new(Self {
            world: Arc::clone(world),
            channel: Arc::clone(channel),
            call,
            op,
            counts,
            stage: Mutex::new(Stage::Reduce { exchange, own }),
        });
        world.register(&stages);
        Ok(stages)
    }

    /// Begins the second stage, after waiting for the first.
    pub(crate) fn advance(&self) {
        let mut stage = lock(&self.stage);
        if !matches!(*stage, Stage::Reduce { .. }) {
            return;
        }
        let Stage::Reduce { exchange, own } = std::mem::replace(&mut *stage, Stage::Over(Ok(())))
        else {
            return;
        };
        *stage = match self.second(exchange, &own) {
            Ok(next) => next,
            Err(error) => Stage::Over(Err(error)),
        };
    }

    fn second(&self, first: Exchange, own: &Shared) -> Result<Stage> {
        let (rank, ranks) = (self.call.place.rank, self.counts.len());
        let dtype = own.as_view().dtype();
        let received = first.finish()?;
        let mut parts: Vec<&[u8]> = received.iter().map(Buffer::host_bytes).collect();
        let own = own.as_view();
        parts.insert(rank, own.host_bytes().unwrap_or_default());
        let mut reduced = Buffer::zeros(dtype, self.counts[rank]);
        reduce_in_rank_order(&mut reduced.as_view_mut(), &parts, self.op)?;
        let reduced = Shared::new(Arc::new(reduced));
        let route = Route {
            stage: 1,
            ..Route::default()
        };
        let mut exchange = Exchange::begin(&self.world, &self.channel, self.call.clone(), route)?;
        for peer in (0..ranks).filter(|&peer| peer != rank) {
            exchange.receive(peer, dtype, self.counts[peer])?;
            exchange.send(peer, reduced.clone())?;
        }
        Ok(Stage::Gather {
            exchange,
            own: reduced,
        })
    }

    /// Waits for the end, and writes the outcome.
    pub(crate) fn finish(&self, output: &mut ViewMut<'_>) -> Result<()> {
        self.advance();
        let stage = std::mem::replace(&mut *lock(&self.stage), Stage::Over(Ok(())));
        let (exchange, own) = match stage {
            Stage::Gather { exchange, own } => (exchange, own),
            Stage::Over(outcome) => return outcome,
            Stage::Reduce { .. } => return Ok(()),
        };
        let parts = exchange.finish()?;
        let mut parts: Vec<&[u8]> = parts.iter().map(Buffer::host_bytes).collect();
        let own = own.as_view();
        parts.insert(self.call.place.rank, own.host_bytes().unwrap_or_default());
        if let Some(bytes) = output.host_bytes_mut() {
            let mut rest = bytes;
            for part in parts {
                let (now, later) = rest.split_at_mut(part.len());
                now.copy_from_slice(part);
                rest = later;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_ranks_never_need_a_second_stage() {
        assert!(!pays(2, 1 << 30) && !pays(8, 1000) && pays(3, 1 << 20));
    }
}

//! Units on their way in, and gradients on their way out: what is communicated while something else is computed.

use std::collections::VecDeque;

use drivetrain_core::Result;
use tch::Tensor;

use crate::{
    microbatch::{Kept, Pass},
    sharding::{Event, Gathered, Gathering, Reducing},
    units::Units,
};

/// Gathers that are under way, in the order of use: forward from the root to the last block, or back.
#[derive(Debug, Default)]
pub(crate) struct Coming {
    /// Units that were started forward.
    started: usize,
    under_way: VecDeque<Gathering>,
}

impl Coming {
    /// The next unit, whole; those after it are under way then.
    pub(crate) fn next(
        &mut self,
        pass: &Pass<'_>,
        units: &Units,
        shards: &[&Tensor],
    ) -> Result<Gathered> {
        let unit = self.started - self.under_way.len();
        let own = match self.under_way.pop_front() {
            Some(own) => own,
            None => self.start(pass, units, shards)?,
        };
        let whole = pass.group.finish_gather(&units.all[unit].layout, own)?;
        pass.group.residents().note(Event::Gathered, unit);
        while self.under_way.len() < pass.prefetch && self.started < units.all.len() {
            let later = self.start(pass, units, shards)?;
            self.under_way.push_back(later);
        }
        Ok(whole)
    }

    fn start(&mut self, pass: &Pass<'_>, units: &Units, shards: &[&Tensor]) -> Result<Gathering> {
        let unit = self.started;
        self.started += 1;
        pass.group.residents().note(Event::Gather, unit);
        let layout = &units.all[unit].layout;
        pass.group.start_gather(layout, shards[unit])
    }

    /// The last of these blocks, whole again; those before it are under way then.
    pub(crate) fn next_again(
        &mut self,
        pass: &Pass<'_>,
        units: &Units,
        blocks: &mut Vec<(Gathered, Option<Kept>)>,
    ) -> Result<Option<(Gathered, Option<Kept>)>> {
        // Block i is unit i + 1.
        let unit = blocks.len();
        let Some((mut whole, kept)) = blocks.pop() else {
            return Ok(None);
        };
        let start = |unit: usize, whole: &mut Gathered| {
            pass.group.residents().note(Event::Gather, unit);
            let (layout, shard) = (&units.all[unit].layout, &units.all[unit].weight);
            pass.group.start_gather_again(layout, shard, whole)
        };
        let own = match self.under_way.pop_front() {
            Some(own) => own,
            None => start(unit, &mut whole)?,
        };
        let layout = &units.all[unit].layout;
        pass.group.finish_gather_again(layout, own, &mut whole)?;
        pass.group.residents().note(Event::Gathered, unit);
        while self.under_way.len() < pass.prefetch.min(blocks.len()) {
            let unit = blocks.len() - self.under_way.len();
            let later = start(unit, &mut blocks[unit - 1].0)?;
            self.under_way.push_back(later);
        }
        Ok(Some((whole, kept)))
    }
}

/// The reduction that is under way, if one is, and whose it is.
#[derive(Debug, Default)]
pub(crate) struct Leaving(Option<(usize, Reducing)>);

impl Leaving {
    /// Adds a micro-batch's gradients of a unit to its step's. With prefetch the sum over ranks is under way when this
    /// returns, and that of the unit before is done.
    pub(crate) fn add(
        &mut self,
        pass: &Pass<'_>,
        units: &mut Units,
        unit: usize,
        gradients: Option<Vec<Tensor>>,
    ) -> Result<()> {
        if !pass.reduce {
            return match gradients {
                Some(gradients) => pass.group.accumulate(&mut units.all[unit], gradients),
                None => Ok(()),
            };
        }
        self.finish(pass, units)?;
        pass.group.residents().note(Event::Reduce, unit);
        let reducing = pass.group.start_reduce(&mut units.all[unit], gradients)?;
        self.0 = Some((unit, reducing));
        match pass.prefetch {
            0 => self.finish(pass, units),
            _ => Ok(()),
        }
    }

    /// Waits for what is under way.
    pub(crate) fn finish(&mut self, pass: &Pass<'_>, units: &mut Units) -> Result<()> {
        match self.0.take() {
            Some((unit, reducing)) => {
                pass.group.finish_reduce(&mut units.all[unit], reducing)?;
                pass.group.residents().note(Event::Reduced, unit);
                Ok(())
            }
            None => Ok(()),
        }
    }
}

//! Where transfers stand among a stage's computations.
//!
//! All stages are run in simulated time, a forward lasting 1 and a backward 2, each computation starting once its
//! stage is free and its input there. A transfer happens when its content is made. Sorted by time, this is one
//! order of everything that happens in the pipeline; a stage's list is what it takes part in. Any such set of
//! lists runs without deadlock, however much an operation blocks: the next item of the common order is always
//! next at both its ends.

use std::collections::BTreeMap;

use super::{PipelineAction, PipelineSchedule, order::Compute};

/// The list of `stage`, from the order in which every stage computes.
pub(super) fn place(
    stage: usize,
    num_stages: usize,
    chunks: usize,
    orders: impl Fn(usize) -> Vec<Compute>,
) -> PipelineSchedule {
    let pipeline = Pipeline { num_stages, chunks };
    let orders: Vec<Vec<Compute>> = (0..num_stages).map(orders).collect();
    let mut events = Vec::new();
    for (at, from, compute) in pipeline.simulate(&orders) {
        if from == stage {
            events.push(((at.start, true, from), compute.action()));
        }
        if let Some((to, next)) = pipeline.next(from, compute)
            && to != from
        {
            // At one moment transfers come before computations, which may need them.
            let key = (at.end, false, from);
            if from == stage {
                events.push((key, compute.sent_to(to)));
            }
            if to == stage {
                events.push((key, next.received_from(from)));
            }
        }
    }
    events.sort_by_key(|(key, _)| *key);
    PipelineSchedule {
        actions: events.into_iter().map(|(_, action)| action).collect(),
    }
}

/// When something happens.
#[derive(Debug, Clone, Copy)]
struct Span {
    start: u64,
    end: u64,
}

struct Pipeline {
    num_stages: usize,
    chunks: usize,
}

impl Pipeline {
    /// Every computation of every stage, and when.
    fn simulate(&self, orders: &[Vec<Compute>]) -> Vec<(Span, usize, Compute)> {
        let mut there: BTreeMap<(usize, Compute), u64> = BTreeMap::new();
        let mut free = vec![0; orders.len()];
        let mut next = vec![0; orders.len()];
        let mut done = Vec::new();
        loop {
            let before = done.len();
            for (stage, order) in orders.iter().enumerate() {
                while let Some(&compute) = order.get(next[stage]) {
                    let input = match self.is_first(stage, compute) {
                        true => Some(0),
                        false => there.get(&(stage, compute)).copied(),
                    };
                    let Some(input) = input else { break };
                    let start = input.max(free[stage]);
                    let end = start + if compute.forward { 1 } else { 2 };
                    if let Some(key) = self.next(stage, compute) {
                        there.insert(key, end);
                    }
                    done.push((Span { start, end }, stage, compute));
                    free[stage] = end;
                    next[stage] += 1;
                }
            }
            if done.len() == before {
                return done;
            }
        }
    }

    /// Whether nothing comes in from another chunk: the first part's forward, the last part's backward.
    fn is_first(&self, stage: usize, compute: Compute) -> bool {
        match compute.forward {
            true => stage == 0 && compute.chunk == 0,
            false => stage + 1 == self.num_stages && compute.chunk + 1 == self.chunks,
        }
    }

    /// Who needs what this computation makes.
    fn next(&self, stage: usize, compute: Compute) -> Option<(usize, Compute)> {
        let Compute { forward, chunk, .. } = compute;
        let parts = self.num_stages * self.chunks;
        let part = chunk * self.num_stages + stage;
        let part = match forward {
            true => Some(part + 1).filter(|&next| next < parts),
            false => part.checked_sub(1),
        }?;
        let chunk = part / self.num_stages;
        Some((part % self.num_stages, Compute { chunk, ..compute }))
    }
}

impl Compute {
    fn action(self) -> PipelineAction {
        let (microbatch, chunk) = (self.microbatch, self.chunk);
        match self.forward {
            true => PipelineAction::Forward { microbatch, chunk },
            false => PipelineAction::Backward { microbatch, chunk },
        }
    }

    /// Hands on what it made.
    #[rustfmt::skip]
    fn sent_to(self, peer: usize) -> PipelineAction {
        let (microbatch, chunk) = (self.microbatch, self.chunk);
        match self.forward {
            true => PipelineAction::SendActivation { microbatch, chunk, peer },
            false => PipelineAction::SendGradient { microbatch, chunk, peer },
        }
    }

    /// Takes in what it needs.
    #[rustfmt::skip]
    fn received_from(self, peer: usize) -> PipelineAction {
        let (microbatch, chunk) = (self.microbatch, self.chunk);
        match self.forward {
            true => PipelineAction::ReceiveActivation { microbatch, chunk, peer },
            false => PipelineAction::ReceiveGradient { microbatch, chunk, peer },
        }
    }
}

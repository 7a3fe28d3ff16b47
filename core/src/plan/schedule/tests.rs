use std::collections::{BTreeMap, VecDeque};

use super::*;

/// What a send does until its message is received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sends {
    /// Nothing: messages are kept for the receiver.
    Buffered,
    /// It blocks.
    Rendezvous,
}

/// All stages of a pipeline, run against each other.
struct World {
    kind: PipelineKind,
    lists: Vec<Vec<PipelineAction>>,
    next: Vec<usize>,
    clock: Vec<u64>,
    posted: BTreeMap<(usize, usize), VecDeque<(Message, u64)>>,
    /// Inputs that have arrived, and forwards whose backward is still to come.
    activations: Vec<Vec<(usize, usize)>>,
    gradients: Vec<Vec<(usize, usize)>>,
    open: Vec<Vec<(usize, usize)>>,
    most_open: Vec<usize>,
    forwards: Vec<Vec<(usize, usize)>>,
    backwards: Vec<Vec<(usize, usize)>>,
}

/// Whether it is an activation, the micro-batch, and the part of the model that receives it.
type Message = (bool, usize, usize);

impl World {
    fn new(kind: PipelineKind, lists: Vec<Vec<PipelineAction>>) -> Self {
        let n = lists.len();
        Self {
            kind,
            lists,
            next: vec![0; n],
            clock: vec![0; n],
            posted: BTreeMap::new(),
            activations: vec![Vec::new(); n],
            gradients: vec![Vec::new(); n],
            open: vec![Vec::new(); n],
            most_open: vec![0; n],
            forwards: vec![Vec::new(); n],
            backwards: vec![Vec::new(); n],
        }
    }

    /// The part of the model that is a chunk of a stage.
    fn part(&self, stage: usize, chunk: usize) -> usize {
        chunk * self.lists.len() + stage
    }

    fn last_part(&self) -> usize {
        self.lists.len() * self.kind.chunks() - 1
    }

    fn action(&self, stage: usize) -> Option<PipelineAction> {
        self.lists[stage].get(self.next[stage]).copied()
    }

    /// Runs until nobody gets on; whether all came to their end.
    fn run(&mut self, sends: Sends) -> bool {
        loop {
            let before: usize = self.next.iter().sum();
            for stage in 0..self.lists.len() {
                while self.step(stage, sends) {}
            }
            if self.next.iter().sum::<usize>() == before {
                return (0..self.lists.len()).all(|s| self.action(s).is_none());
            }
        }
    }

    /// Whether the stage's next action could be done.
    fn step(&mut self, stage: usize, sends: Sends) -> bool {
        let Some(action) = self.action(stage) else {
            return false;
        };
        match action {
            PipelineAction::Forward { microbatch, chunk } => {
                self.forward(stage, (microbatch, chunk));
            }
            PipelineAction::Backward { microbatch, chunk } => {
                self.backward(stage, (microbatch, chunk));
            }
            PipelineAction::SendActivation { peer, .. }
            | PipelineAction::SendGradient { peer, .. } => {
                let message = self.sent(stage, action);
                if sends == Sends::Rendezvous {
                    // The receiver takes both a step on.
                    let meets = self.action(peer).is_some_and(|theirs| {
                        self.received(peer, theirs) == Some((stage, message))
                    });
                    if !meets {
                        return false;
                    }
                    let now = self.clock[stage].max(self.clock[peer]);
                    (self.clock[stage], self.clock[peer]) = (now, now);
                    self.next[peer] += 1;
                    self.arrive(peer, message);
                } else {
                    let now = self.clock[stage];
                    let queue = self.posted.entry((stage, peer)).or_default();
                    queue.push_back((message, now));
                }
            }
            PipelineAction::ReceiveActivation { peer, .. }
            | PipelineAction::ReceiveGradient { peer, .. } => {
                let queue = self.posted.entry((peer, stage)).or_default();
                let Some((message, when)) = queue.pop_front() else {
                    return false;
                };
                // Messages are matched by their order alone.
                assert_eq!(self.received(stage, action), Some((peer, message)));
                self.clock[stage] = self.clock[stage].max(when);
                self.arrive(stage, message);
            }
        }
        self.next[stage] += 1;
        true
    }

    fn forward(&mut self, stage: usize, work: (usize, usize)) {
        if self.part(stage, work.1) != 0 && self.lists.len() > 1 {
            take(&mut self.activations[stage], work);
        }
        self.forwards[stage].push(work);
        self.open[stage].push(work);
        self.most_open[stage] = self.most_open[stage].max(self.open[stage].len());
        self.clock[stage] += 1;
    }

    fn backward(&mut self, stage: usize, work: (usize, usize)) {
        if self.part(stage, work.1) != self.last_part() && self.lists.len() > 1 {
            take(&mut self.gradients[stage], work);
        }
        take(&mut self.open[stage], work);
        self.backwards[stage].push(work);
        self.clock[stage] += 2;
    }

    fn arrive(&mut self, stage: usize, (activation, microbatch, part): Message) {
        assert_eq!(part % self.lists.len(), stage);
        let work = (microbatch, part / self.lists.len());
        match activation {
            true => self.activations[stage].push(work),
            false => self.gradients[stage].push(work),
        }
    }

    /// What a send holds; it must have been made.
    fn sent(&self, stage: usize, action: PipelineAction) -> Message {
        match action {
            PipelineAction::SendActivation {
                microbatch, chunk, ..
            } => {
                assert!(self.forwards[stage].contains(&(microbatch, chunk)));
                (true, microbatch, self.part(stage, chunk) + 1)
            }
            PipelineAction::SendGradient {
                microbatch, chunk, ..
            } => {
                assert!(self.backwards[stage].contains(&(microbatch, chunk)));
                (false, microbatch, self.part(stage, chunk) - 1)
            }
            _ => unreachable!("called for sends"),
        }
    }

    fn received(&self, stage: usize, action: PipelineAction) -> Option<(usize, Message)> {
        match action {
            PipelineAction::ReceiveActivation {
                microbatch,
                chunk,
                peer,
            } => Some((peer, (true, microbatch, self.part(stage, chunk)))),
            PipelineAction::ReceiveGradient {
                microbatch,
                chunk,
                peer,
            } => Some((peer, (false, microbatch, self.part(stage, chunk)))),
            _ => None,
        }
    }
}

/// It must be there, once.
fn take(work: &mut Vec<(usize, usize)>, wanted: (usize, usize)) {
    let at = work.iter().position(|w| *w == wanted);
    work.remove(at.unwrap_or_else(|| panic!("{wanted:?} is not in {work:?}")));
}

fn kind(chunks: usize) -> PipelineKind {
    match chunks {
        1 => PipelineKind::OneForwardOneBackward,
        chunks => PipelineKind::Interleaved { chunks },
    }
}

/// Stages, chunks, micro-batches.
fn grid() -> impl Iterator<Item = (usize, usize, usize)> {
    let sizes = (1..=8).flat_map(|stages| (1..=4).map(move |chunks| (stages, chunks)));
    sizes.flat_map(|(stages, chunks)| {
        let step = kind(chunks).multiple_of(stages);
        let most = if chunks == 1 { 17 } else { 4 };
        (0..=most).map(move |n| (stages, chunks, n * step))
    })
}

fn lists(
    of: impl Fn(PipelineKind, usize, usize, usize) -> Result<PipelineSchedule>,
    (stages, chunks, microbatches): (usize, usize, usize),
) -> Vec<Vec<PipelineAction>> {
    let list = |stage| of(kind(chunks), stage, stages, microbatches);
    (0..stages)
        .map(|stage| list(stage).unwrap().actions)
        .collect()
}

#[test]
fn steps_run_to_their_end_whether_sends_block_or_not() {
    for sends in [Sends::Buffered, Sends::Rendezvous] {
        for (stages, chunks, microbatches) in grid() {
            let what = format!("{sends:?}: {stages} x {chunks}, {microbatches} micro-batches");
            let lists = lists(PipelineSchedule::of, (stages, chunks, microbatches));
            let mut world = World::new(kind(chunks), lists);
            assert!(world.run(sends), "{what}: deadlock at {:?}", world.next);
            assert!(world.posted.values().all(VecDeque::is_empty), "{what}");
            for stage in 0..stages {
                let (forwards, backwards) = (&world.forwards[stage], &world.backwards[stage]);
                assert!(world.open[stage].is_empty() && world.activations[stage].is_empty());
                assert!(world.gradients[stage].is_empty());
                for chunk in 0..chunks {
                    // Once each, and in order: gradients add up as one stage would add them.
                    let of_chunk = |w: &&(usize, usize)| w.1 == chunk;
                    for done in [forwards, backwards] {
                        let done: Vec<_> = done.iter().filter(of_chunk).map(|w| w.0).collect();
                        assert!(done.iter().copied().eq(0..microbatches), "{what}: {done:?}");
                    }
                }
                let most = kind(chunks).most_in_flight(stage, stages, microbatches);
                assert_eq!(world.most_open[stage], most, "{what}, stage {stage}");
            }
        }
    }
}

/// Waiting for a receive where it stands costs no time: the pipeline idles for what Narayanan et al. give,
/// `(stages - 1)(forward + backward) / chunks`, a chunk's forward being 1 and its backward 2.
#[test]
fn stages_idle_no_longer_than_the_papers_bubble() {
    for (stages, chunks, microbatches) in grid().filter(|g| g.2 >= g.0) {
        let lists = lists(PipelineSchedule::of, (stages, chunks, microbatches));
        let mut world = World::new(kind(chunks), lists);
        assert!(world.run(Sends::Buffered));
        let work = 3 * (microbatches * chunks) as u64;
        let bubble = 3 * (stages as u64 - 1);
        assert_eq!(
            world.clock.iter().max().copied(),
            Some(work + bubble),
            "{stages} x {chunks}, {microbatches} micro-batches"
        );
    }
}

#[test]
fn at_most_so_many_forwards_are_in_flight() {
    let plain = PipelineKind::OneForwardOneBackward;
    for (stages, microbatches) in [(4, 16), (4, 2), (1, 3)] {
        for stage in 0..stages {
            let most = plain.most_in_flight(stage, stages, microbatches);
            assert_eq!(most, (stages - stage).min(microbatches));
        }
    }
    // Figure 4 of Narayanan et al.: 4 stages of 2 chunks, 8 micro-batches.
    let chunked = PipelineKind::Interleaved { chunks: 2 };
    let most = |stage| chunked.most_in_flight(stage, 4, 8);
    assert_eq!([0, 1, 2, 3].map(most), [11, 9, 7, 5]);
}

#[test]
fn scoring_runs_forward_alone() {
    for sends in [Sends::Buffered, Sends::Rendezvous] {
        for (stages, chunks, microbatches) in grid() {
            let lists = lists(
                PipelineSchedule::forward_only,
                (stages, chunks, microbatches),
            );
            let mut world = World::new(kind(chunks), lists);
            assert!(world.run(sends), "{stages} x {chunks}, {microbatches}");
            for forwards in &world.forwards {
                assert_eq!(forwards.len(), microbatches * chunks);
            }
        }
    }
}

#[test]
fn one_stage_goes_micro_batch_by_micro_batch() {
    let actions = PipelineSchedule::of(PipelineKind::OneForwardOneBackward, 0, 1, 2);
    let chunk = 0;
    let both = |microbatch| {
        [
            PipelineAction::Forward { microbatch, chunk },
            PipelineAction::Backward { microbatch, chunk },
        ]
    };
    assert_eq!(actions.unwrap().actions, [both(0), both(1)].concat());
}

#[test]
fn interleaved_stages_refuse_a_broken_round() {
    let error = PipelineSchedule::of(PipelineKind::Interleaved { chunks: 2 }, 0, 4, 6).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Data);
    let text = error.to_string();
    assert!(
        text.contains("6 micro-batches") && text.contains("4 stages"),
        "{text}"
    );
}

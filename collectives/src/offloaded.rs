//! The communicator.

use std::{fmt, ops::Range, sync::Arc, time::Duration};

use drivetrain_core::{
    Buffer, DType, Error, ErrorKind, Result, View, ViewMut,
    communicator::{Communicator, Input, ReduceOp, Shared, Work},
};

use crate::{
    Collective, Group, GroupId,
    worker::{Outcome, Worker},
};

/// How groups come to be.
pub trait Open: fmt::Debug + Send + Sync {
    /// An id for a new group; asked of its first member.
    ///
    /// # Errors
    /// The library's.
    fn id(&self) -> Result<GroupId>;

    /// Joins a group as one of its members; all do so at the same time.
    ///
    /// # Errors
    /// The library's.
    fn join(&self, id: &GroupId, rank: usize, size: usize) -> Result<Arc<dyn Group>>;
}

/// A communicator of the host whose f32 collectives run on devices.
#[derive(Debug)]
pub struct Offloaded {
    host: Arc<dyn Communicator>,
    open: Arc<dyn Open>,
    /// None for a rank alone.
    worker: Option<Worker>,
}

/// Of a call, what all members must agree on: which operation, its root or length, and what each gives to each.
type Signature = Vec<i64>;

impl Offloaded {
    /// Makes a group of the host's ranks. Collective over `host`.
    ///
    /// # Errors
    /// Those of the library, of any rank; the communicator's.
    pub fn new(host: Arc<dyn Communicator>, open: Arc<dyn Open>) -> Result<Self> {
        let worker = match host.world_size() {
            1 => None,
            size => {
                let mut id = [0; 128];
                let made = match host.rank() {
                    0 => open.id().map(|made| id = made),
                    _ => Ok(()),
                };
                host.agree("make_group", made)?;
                host.broadcast((&mut id[..]).into(), 0)?.wait()?;
                let joined = open.join(&id, host.rank(), size);
                Some(Worker::start(host.agree("join_group", joined)?)?)
            }
        };
        Ok(Self { host, open, worker })
    }

    /// Starts an operation in the group.
    fn start(&self, worker: &Worker, collective: Collective, input: Vec<f32>) -> Result<Started> {
        self.check(&collective, input.len())?;
        let own = self.signature(&collective, input.len());
        let counts = vec![own.len(); self.world_size()];
        let arrivals = Shared::new(Arc::new(Buffer::I64(own)));
        Ok(Started {
            arrivals: self.host.all_gather_shared(arrivals, &counts)?,
            outcome: worker.call(collective.clone(), input),
            worker: worker.clone(),
            host: Arc::clone(&self.host),
            collective,
        })
    }

    /// An operation whose output goes to `output`.
    fn start_into<'a>(
        &self,
        worker: &Worker,
        collective: Collective,
        input: Vec<f32>,
        output: &'a mut [f32],
    ) -> Result<Work<'a>> {
        let expected = match collective {
            // Wrong counts are found below.
            Collective::ReduceScatter { ref counts } => counts.get(self.rank()).copied(),
            _ => Some(collective.output_len(self.rank(), input.len())),
        };
        if expected.is_some_and(|expected| expected != output.len()) {
            let (name, found) = (collective.name(), output.len());
            return Err(self.misfit(name, "the output", expected.unwrap_or_default(), found));
        }
        let started = self.start(worker, collective, input)?;
        let outcome = Arc::clone(&started.outcome);
        Ok(Work::polled(
            move || outcome.is_there(),
            move || {
                output.copy_from_slice(&started.finish()?);
                Ok(())
            },
        ))
    }

    /// Whether the call makes sense for this rank.
    fn check(&self, collective: &Collective, input: usize) -> Result<()> {
        let (name, size) = (collective.name(), self.world_size());
        let (lists, expected): (&[&Vec<usize>], _) = match collective {
            Collective::AllReduce => (&[], input),
            Collective::Broadcast { root } if *root < size => (&[], input),
            Collective::Broadcast { root } => {
                return Err(self.misfit(name, "a member below", size, *root));
            }
            Collective::AllGather { counts } => (
                &[counts],
                counts.get(self.rank()).copied().unwrap_or_default(),
            ),
            Collective::ReduceScatter { counts } => (&[counts], counts.iter().sum()),
            Collective::AllToAll {
                send_counts,
                receive_counts,
            } => (&[send_counts, receive_counts], send_counts.iter().sum()),
        };
        if let Some(counts) = lists.iter().find(|counts| counts.len() != size) {
            return Err(self.misfit(name, "counts", size, counts.len()));
        }
        match input == expected {
            true => Ok(()),
            false => Err(self.misfit(name, "the input", expected, input)),
        }
    }

    fn misfit(&self, operation: &'static str, what: &str, expected: usize, found: usize) -> Error {
        let message = format!("{what} does not fit");
        Error::new(ErrorKind::Defect, operation, message)
            .with("group", self.label())
            .with("rank", self.members()[self.rank()])
            .with("expected", expected)
            .with("found", found)
    }

    fn signature(&self, collective: &Collective, input: usize) -> Signature {
        let none = vec![0; self.world_size()];
        let (kind, number, counts) = match collective {
            Collective::AllReduce => (0, input, &none),
            Collective::AllGather { counts } => (1, 0, counts),
            Collective::ReduceScatter { counts } => (2, 0, counts),
            Collective::Broadcast { root } => (3, input * self.world_size() + root, &none),
            Collective::AllToAll { send_counts, .. } => (4, 0, send_counts),
        };
        let counts = counts.iter().map(|&n| n as i64);
        [kind, number as i64].into_iter().chain(counts).collect()
    }
}

/// An operation that this member has begun.
struct Started {
    arrivals: Work<'static, Vec<Shared>>,
    outcome: Arc<Outcome>,
    worker: Worker,
    host: Arc<dyn Communicator>,
    collective: Collective,
}

impl Started {
    /// Waits until all have begun the same, then for the output.
    fn finish(self) -> Result<Vec<f32>> {
        let Self {
            arrivals,
            outcome,
            worker,
            host,
            collective,
        } = self;
        let name = collective.name();
        let arrived = arrivals
            .wait()
            .and_then(|all| agree(&*host, &collective, &all));
        if let Err(error) = arrived {
            worker.abort();
            return Err(error.with("collective", name));
        }
        let timeout = host.timeout();
        let output = outcome.take(timeout).unwrap_or_else(|| {
            worker.abort();
            let message = "every member came, and the library did not end the operation";
            Err(Error::new(ErrorKind::Timeout, name, message)
                .with("timeout", format!("{timeout:?}")))
        });
        output.map_err(|error| {
            let rank = host.members()[host.rank()];
            let error = error.with("group", host.label()).with("rank", rank);
            host.abort(&error);
            error
        })
    }
}

/// Whether all members have begun the same operation, and give what this one expects.
fn agree(host: &dyn Communicator, collective: &Collective, all: &[Shared]) -> Result<()> {
    let views: Vec<_> = all.iter().map(Shared::as_view).collect();
    let signatures: Vec<&[i64]> = views
        .iter()
        .map(|view| match view {
            View::I64(signature) => *signature,
            _ => &[],
        })
        .collect();
    let (me, own) = (host.rank(), signatures[host.rank()]);
    let same = |other: &[i64]| match collective {
        Collective::AllToAll { .. } => other.first() == own.first(),
        _ => other == own,
    };
    let expected = |from: usize| match collective {
        Collective::AllToAll { receive_counts, .. } => Some(receive_counts[from] as i64),
        _ => None,
    };
    for (from, other) in signatures.iter().enumerate() {
        let given = other.get(2 + me).copied();
        let fits = expected(from).is_none_or(|expected| given == Some(expected));
        if !same(other) || !fits {
            let message = "ranks disagree on an operation or its counts";
            return Err(Error::new(ErrorKind::Defect, collective.name(), message)
                .with("group", host.label())
                .with("rank", host.members()[me])
                .with("from", host.members()[from])
                .with(
                    "expected",
                    format!("{:?}", expected(from).map_or(own.to_vec(), |n| vec![n])),
                )
                .with("found", format!("{other:?}")));
        }
    }
    Ok(())
}

/// f32 of the host, as the group takes it; `None` is for the host's communicator.
fn floats(input: &Input<'_>) -> Option<Vec<f32>> {
    match input.as_view() {
        View::F32(values) => Some(values.to_vec()),
        _ => None,
    }
}

impl Communicator for Offloaded {
    fn rank(&self) -> usize {
        self.host.rank()
    }

    fn world_size(&self) -> usize {
        self.host.world_size()
    }

    fn members(&self) -> &[usize] {
        self.host.members()
    }

    fn label(&self) -> &str {
        self.host.label()
    }

    fn timeout(&self) -> Duration {
        self.host.timeout()
    }

    fn all_reduce<'a>(&self, buffer: ViewMut<'a>, op: ReduceOp) -> Result<Work<'a>> {
        match (&self.worker, buffer, op) {
            (Some(worker), ViewMut::F32(values), ReduceOp::Sum) => {
                let input = values.to_vec();
                self.start_into(worker, Collective::AllReduce, input, values)
            }
            (_, buffer, op) => self.host.all_reduce(buffer, op),
        }
    }

    fn all_gather<'a>(
        &self,
        input: Input<'a>,
        output: ViewMut<'a>,
        counts: &[usize],
    ) -> Result<Work<'a>> {
        match (&self.worker, floats(&input), output) {
            (Some(worker), Some(values), ViewMut::F32(output)) => {
                let counts = counts.to_vec();
                self.start_into(worker, Collective::AllGather { counts }, values, output)
            }
            (_, _, output) => self.host.all_gather(input, output, counts),
        }
    }

    fn all_gather_shared(
        &self,
        input: Shared,
        counts: &[usize],
    ) -> Result<Work<'static, Vec<Shared>>> {
        let (Some(worker), View::F32(values)) = (&self.worker, input.as_view()) else {
            return self.host.all_gather_shared(input, counts);
        };
        let values = values.to_vec();
        let counts = counts.to_vec();
        let collective = Collective::AllGather {
            counts: counts.clone(),
        };
        let started = self.start(worker, collective, values)?;
        let outcome = Arc::clone(&started.outcome);
        Ok(Work::polled(
            move || outcome.is_there(),
            move || {
                let all = Shared::new(Arc::new(Buffer::F32(started.finish()?)));
                let mut at = 0;
                let mut next = |len: usize| -> Range<usize> {
                    at += len;
                    at - len..at
                };
                Ok(counts.iter().map(|&len| all.slice(next(len))).collect())
            },
        ))
    }

    fn reduce_scatter<'a>(
        &self,
        input: Input<'a>,
        output: ViewMut<'a>,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<Work<'a>> {
        match (&self.worker, floats(&input), output, op) {
            (Some(worker), Some(values), ViewMut::F32(output), ReduceOp::Sum) => {
                let counts = counts.to_vec();
                self.start_into(worker, Collective::ReduceScatter { counts }, values, output)
            }
            (_, _, output, op) => self.host.reduce_scatter(input, output, counts, op),
        }
    }

    fn broadcast<'a>(&self, buffer: ViewMut<'a>, root: usize) -> Result<Work<'a>> {
        match (&self.worker, buffer) {
            (Some(worker), ViewMut::F32(values)) => {
                let input = values.to_vec();
                self.start_into(worker, Collective::Broadcast { root }, input, values)
            }
            (_, buffer) => self.host.broadcast(buffer, root),
        }
    }

    fn all_to_all<'a>(
        &self,
        input: Input<'a>,
        send_counts: &[usize],
        output: ViewMut<'a>,
        receive_counts: &[usize],
    ) -> Result<Work<'a>> {
        match (&self.worker, floats(&input), output) {
            (Some(worker), Some(values), ViewMut::F32(output)) => {
                let collective = Collective::AllToAll {
                    send_counts: send_counts.to_vec(),
                    receive_counts: receive_counts.to_vec(),
                };
                self.start_into(worker, collective, values, output)
            }
            (_, _, output) => self
                .host
                .all_to_all(input, send_counts, output, receive_counts),
        }
    }

    fn send(&self, buffer: Buffer, to: usize) -> Result<Work<'static>> {
        self.host.send(buffer, to)
    }

    fn receive(&self, dtype: DType, len: usize, from: usize) -> Result<Work<'static, Buffer>> {
        self.host.receive(dtype, len, from)
    }

    fn exchange<'a>(
        &self,
        input: Input<'a>,
        to: usize,
        output: ViewMut<'a>,
        from: usize,
    ) -> Result<Work<'a>> {
        self.host.exchange(input, to, output, from)
    }

    fn barrier(&self) -> Result<()> {
        self.host.barrier()
    }

    fn subgroup(&self, ranks: &[usize], label: &str) -> Result<Arc<dyn Communicator>> {
        let host = self.host.subgroup(ranks, label)?;
        Ok(Arc::new(Self::new(host, Arc::clone(&self.open))?))
    }

    fn abort(&self, cause: &Error) {
        self.host.abort(cause);
        if let Some(worker) = &self.worker {
            worker.abort();
        }
    }
}

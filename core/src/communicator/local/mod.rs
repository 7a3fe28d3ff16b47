//! Ranks as threads of one process.
//!
//! An operation deposits its input at the call, a copy where it is borrowed, and finishes in [`Work::wait`], where
//! every rank reads the others' deposits and reduces them itself, in rank order: the same bits on each. A buffer that is
//! sent is not copied: its receiver gets it.

mod buffer;
mod world;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use buffer::{Payload, copy_into, device_output, reduce_into};
use world::{GroupCall, Receipt, Ticket, World};

use super::{
    Communicator, Input, ReduceOp, Shared, Work,
    transport::{Call, Calls, Descriptor, Place, offset},
};
use crate::{Buffer, DType, Error, ErrorKind, Result, ViewMut};

/// How thread ranks communicate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LocalOptions {
    /// How long an operation may wait for the other ranks.
    pub timeout: Duration,
}

impl Default for LocalOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(600),
        }
    }
}

/// One thread rank's end of a group.
#[derive(Debug)]
pub struct LocalCommunicator {
    world: Arc<World>,
    group: usize,
    place: Place,
    timeout: Duration,
    calls: Mutex<Calls>,
    /// How many groups of these members and this label it has made.
    subgroups: Mutex<BTreeMap<(Vec<usize>, String), usize>>,
}

impl LocalCommunicator {
    /// The ends of a new world, one a rank.
    pub fn world(world_size: usize, options: LocalOptions) -> Vec<Arc<Self>> {
        let world = Arc::new(World::default());
        let members: Vec<usize> = (0..world_size).collect();
        let group = world.group(None, &members, "world", 0);
        (0..world_size)
            .map(|rank| {
                Arc::new(Self {
                    world: Arc::clone(&world),
                    group,
                    place: Place::in_world(rank, world_size),
                    timeout: options.timeout,
                    calls: Mutex::default(),
                    subgroups: Mutex::default(),
                })
            })
            .collect()
    }

    /// Says that this rank will call nothing more: whoever waits for it fails at once instead of at the
    /// timeout.
    pub fn depart(&self) {
        self.world.depart(self.place.world_rank());
    }

    fn calls(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn call(&self, sequence: u64, descriptor: Descriptor) -> GroupCall {
        GroupCall {
            group: self.group,
            call: Call {
                place: self.place.clone(),
                sequence,
                descriptor,
                timeout: self.timeout,
            },
        }
    }

    /// Deposits and returns what finishes with all members' deposits.
    fn collective<'a, T>(
        &self,
        descriptor: Descriptor,
        input: Payload,
        finish: impl FnOnce(&[Arc<Payload>]) -> Result<T> + Send + 'a,
    ) -> Result<Work<'a, T>> {
        let call = self.call(self.calls().next_collective(), descriptor);
        let (world, group, sequence) = (Arc::clone(&self.world), call.group, call.call.sequence);
        let ticket = Ticket::deposit(&self.world, call, input)?;
        Ok(Work::polled(
            move || world.is_complete(group, sequence),
            move || finish(&ticket.collect()?),
        ))
    }

    fn post(&self, operation: &'static str, payload: Payload, to: usize) -> Result<()> {
        self.place.check_peer(operation, to)?;
        let sequence = self.calls().next_send(to);
        self.world
            .post((self.group, self.place.rank, to, sequence), payload)
    }

    /// What will take the next message from a rank.
    fn expect(
        &self,
        operation: &'static str,
        dtype: DType,
        len: usize,
        from: usize,
    ) -> Result<Receipt> {
        self.place.check_peer(operation, from)?;
        let sequence = self.calls().next_receive(from);
        let call = self.call(sequence, Descriptor::new(operation, dtype, vec![len]));
        Ok(Receipt::new(&self.world, call, from))
    }
}

impl Communicator for LocalCommunicator {
    fn rank(&self) -> usize {
        self.place.rank
    }

    fn world_size(&self) -> usize {
        self.place.members.len()
    }

    fn members(&self) -> &[usize] {
        &self.place.members
    }

    fn label(&self) -> &str {
        &self.place.label
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }

    fn all_reduce<'a>(&self, mut buffer: ViewMut<'a>, op: ReduceOp) -> Result<Work<'a>> {
        let len = buffer.len();
        let descriptor = Descriptor::new("all_reduce", buffer.dtype(), vec![len]).reducing(op);
        let input = Payload::of("all_reduce", buffer.as_view().into())?;
        self.collective(descriptor, input, move |deposits| {
            reduce_into(&mut buffer, deposits, 0, op)
        })
    }

    fn all_gather<'a>(
        &self,
        input: Input<'a>,
        mut output: ViewMut<'a>,
        counts: &[usize],
    ) -> Result<Work<'a>> {
        const OPERATION: &str = "all_gather";
        self.place
            .check_all_gather(OPERATION, input.as_view(), &output, counts)?;
        let descriptor = Descriptor::new(OPERATION, input.as_view().dtype(), counts.to_vec());
        let counts = counts.to_vec();
        self.collective(
            descriptor,
            Payload::of(OPERATION, input)?,
            move |deposits| {
                for (rank, deposit) in deposits.iter().enumerate() {
                    copy_into(&mut output, offset(&counts, rank), deposit, 0, counts[rank])?;
                }
                Ok(())
            },
        )
    }

    fn all_gather_shared(
        &self,
        input: Shared,
        counts: &[usize],
    ) -> Result<Work<'static, Vec<Shared>>> {
        const OPERATION: &str = "all_gather";
        self.place.check_counts(OPERATION, counts)?;
        self.place
            .check_len(OPERATION, counts[self.place.rank], input.as_view().len())?;
        let descriptor = Descriptor::new(OPERATION, input.as_view().dtype(), counts.to_vec());
        let payload = Payload::of(OPERATION, Input::Shared(input))?;
        self.collective(descriptor, payload, |deposits| {
            let shared = deposits.iter().map(|d| d.shared().cloned());
            shared.collect::<Option<_>>().ok_or_else(device_output)
        })
    }

    fn reduce_scatter<'a>(
        &self,
        input: Input<'a>,
        mut output: ViewMut<'a>,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<Work<'a>> {
        const OPERATION: &str = "reduce_scatter";
        self.place
            .check_reduce_scatter(OPERATION, input.as_view(), &output, counts)?;
        let dtype = input.as_view().dtype();
        let descriptor = Descriptor::new(OPERATION, dtype, counts.to_vec()).reducing(op);
        let start = offset(counts, self.place.rank);
        self.collective(
            descriptor,
            Payload::of(OPERATION, input)?,
            move |deposits| reduce_into(&mut output, deposits, start, op),
        )
    }

    fn broadcast<'a>(&self, mut buffer: ViewMut<'a>, root: usize) -> Result<Work<'a>> {
        const OPERATION: &str = "broadcast";
        self.place.check_peer(OPERATION, root)?;
        let len = buffer.len();
        let descriptor = Descriptor::new(OPERATION, buffer.dtype(), vec![len, root]);
        let is_root = self.place.rank == root;
        let input = if is_root {
            Payload::of(OPERATION, buffer.as_view().into())?
        } else {
            Payload::empty()
        };
        self.collective(descriptor, input, move |deposits| {
            if is_root {
                Ok(())
            } else {
                copy_into(&mut buffer, 0, &deposits[root], 0, len)
            }
        })
    }

    fn all_to_all<'a>(
        &self,
        input: Input<'a>,
        send_counts: &[usize],
        mut output: ViewMut<'a>,
        receive_counts: &[usize],
    ) -> Result<Work<'a>> {
        const OPERATION: &str = "all_to_all";
        let (given, taken) = ((input.as_view(), send_counts), (&output, receive_counts));
        self.place.check_all_to_all(OPERATION, given, taken)?;
        let dtype = input.as_view().dtype();
        let descriptor = Descriptor::new(OPERATION, dtype, Vec::new());
        let payload = Payload::of(OPERATION, input)?.with_counts(send_counts);
        let (place, receive_counts) = (self.place.clone(), receive_counts.to_vec());
        self.collective(descriptor, payload, move |deposits| {
            for (from, deposit) in deposits.iter().enumerate() {
                let sent = deposit.counts()[place.rank];
                if sent != receive_counts[from] {
                    return Err(Error::new(
                        ErrorKind::Defect,
                        OPERATION,
                        "ranks disagree on a count",
                    )
                    .with("group", &place.label)
                    .with("rank", place.world_rank())
                    .with("from", place.members[from])
                    .with("expected", receive_counts[from])
                    .with("found", sent));
                }
                let from_start = offset(deposit.counts(), place.rank);
                copy_into(
                    &mut output,
                    offset(&receive_counts, from),
                    deposit,
                    from_start,
                    sent,
                )?;
            }
            Ok(())
        })
    }

    fn send(&self, buffer: Buffer, to: usize) -> Result<Work<'static>> {
        self.post("send", Payload::given(buffer), to)?;
        Ok(Work::done())
    }

    fn receive(&self, dtype: DType, len: usize, from: usize) -> Result<Work<'static, Buffer>> {
        let receipt = self.expect("receive", dtype, len, from)?;
        Ok(Work::polled(receipt.arrival(), move || {
            receipt.take()?.into_buffer().ok_or_else(device_output)
        }))
    }

    fn exchange<'a>(
        &self,
        input: Input<'a>,
        to: usize,
        mut output: ViewMut<'a>,
        from: usize,
    ) -> Result<Work<'a>> {
        const OPERATION: &str = "exchange";
        self.place.check_peer(OPERATION, from)?;
        self.post(OPERATION, Payload::of(OPERATION, input)?, to)?;
        let len = output.len();
        let receipt = self.expect(OPERATION, output.dtype(), len, from)?;
        Ok(Work::polled(receipt.arrival(), move || {
            copy_into(&mut output, 0, &receipt.take()?, 0, len)
        }))
    }

    fn barrier(&self) -> Result<()> {
        let descriptor = Descriptor::new("barrier", DType::U8, Vec::new());
        self.collective(descriptor, Payload::empty(), |_| Ok(()))?
            .wait()
    }

    fn subgroup(&self, ranks: &[usize], label: &str) -> Result<Arc<dyn Communicator>> {
        let place = self.place.in_subgroup(ranks, label)?;
        let instance = {
            let subgroups = self.subgroups.lock();
            let mut subgroups = subgroups.unwrap_or_else(PoisonError::into_inner);
            let key = (place.members.clone(), label.to_owned());
            let count = subgroups.entry(key).or_default();
            *count += 1;
            *count
        };
        Ok(Arc::new(Self {
            world: Arc::clone(&self.world),
            group: self
                .world
                .group(Some(self.group), &place.members, label, instance),
            place,
            timeout: self.timeout,
            calls: Mutex::default(),
            subgroups: Mutex::default(),
        }))
    }

    fn abort(&self, cause: &Error) {
        self.world.abort(cause);
    }
}

#[cfg(test)]
mod tests;

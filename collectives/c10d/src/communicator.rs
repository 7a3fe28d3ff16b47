//! Operations among processes, made of messages.

use std::{fmt, sync::Arc, time::Duration};

use drivetrain_core::{
    Buffer, DType, Error, Result, View, ViewMut,
    communicator::{
        Communicator, Input, ReduceOp, Shared, Work,
        transport::{Call, Descriptor, Place, offset, reduce_in_place, reduce_in_rank_order},
    },
};

use crate::{
    all_reduce::{self, TwoStages},
    exchange::{Exchange, Route, message_of, not_host},
    world::{Channel, World, lock},
};

/// One process's end of a group.
pub struct GlooCommunicator {
    world: Arc<World>,
    channel: Arc<Channel>,
    place: Place,
}

impl GlooCommunicator {
    pub(crate) fn new(world: Arc<World>, place: Place) -> Result<Self> {
        let channel = world.channel(&place)?;
        Ok(Self {
            world,
            channel,
            place,
        })
    }

    fn call(&self, sequence: u64, descriptor: Descriptor) -> Call {
        Call {
            place: self.place.clone(),
            sequence,
            descriptor,
            timeout: self.world.timeout,
        }
    }

    /// Of one message between this rank and another.
    fn between_two(&self, call: Call) -> Result<Exchange> {
        let route = Route {
            between_two: true,
            ..Route::default()
        };
        Exchange::begin(&self.world, &self.channel, call, route)
    }

    fn next_collective(&self, descriptor: Descriptor) -> Call {
        let sequence = lock(&self.channel.calls).next_collective();
        self.call(sequence, descriptor)
    }

    fn collective(&self, descriptor: Descriptor) -> Result<Exchange> {
        let call = self.next_collective(descriptor);
        Exchange::begin(&self.world, &self.channel, call, Route::default())
    }

    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.place.rank;
        (0..self.place.members.len()).filter(move |&peer| peer != rank)
    }

    /// What finishes an operation: the parts of all other ranks that sent any, in rank order.
    fn pending<'a, T>(
        &self,
        exchange: Exchange,
        finish: impl FnOnce(Vec<Buffer>) -> Result<T> + Send + 'a,
    ) -> Work<'a, T> {
        let world = Arc::clone(&self.world);
        Work::pending(move || {
            world.progress();
            finish(exchange.finish()?)
        })
    }

    fn message_to(&self, to: usize, operation: &'static str, view: View<'_>) -> Call {
        let sequence = lock(&self.channel.calls).next_send(to);
        self.call(sequence, message_of(operation, view.dtype(), view.len()))
    }

    fn message_from(&self, from: usize, operation: &'static str, dtype: DType, len: usize) -> Call {
        let sequence = lock(&self.channel.calls).next_receive(from);
        self.call(sequence, message_of(operation, dtype, len))
    }

    fn start_send(&self, operation: &'static str, part: Shared, to: usize) -> Result<Exchange> {
        let call = self.message_to(to, operation, part.as_view());
        let mut exchange = self.between_two(call)?;
        exchange.send(to, part)?;
        Ok(exchange)
    }

    fn start_receive(
        &self,
        operation: &'static str,
        dtype: DType,
        len: usize,
        from: usize,
    ) -> Result<Exchange> {
        let call = self.message_from(from, operation, dtype, len);
        let mut exchange = self.between_two(call)?;
        exchange.receive(from, dtype, len)?;
        Ok(exchange)
    }
}

/// What an operation may hold for as long as it takes: a copy of what is borrowed.
fn shared(operation: &'static str, input: Input<'_>) -> Result<Shared> {
    match input {
        Input::Shared(shared) => Ok(shared),
        Input::Borrowed(view) => Buffer::copy(view)
            .map(|copy| Shared::new(Arc::new(copy)))
            .ok_or_else(|| not_host(operation)),
    }
}

fn write(
    operation: &'static str,
    output: &mut ViewMut<'_>,
    at: usize,
    part: View<'_>,
) -> Result<()> {
    if part.is_empty() {
        return Ok(());
    }
    let size = part.dtype().size();
    let (Some(bytes), Some(part)) = (output.host_bytes_mut(), part.host_bytes()) else {
        return Err(not_host(operation));
    };
    bytes[at * size..][..part.len()].copy_from_slice(part);
    Ok(())
}

impl Communicator for GlooCommunicator {
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
        self.world.timeout
    }

    fn all_reduce<'a>(&self, mut buffer: ViewMut<'a>, op: ReduceOp) -> Result<Work<'a>> {
        const OPERATION: &str = "all_reduce";
        let (dtype, len) = (buffer.dtype(), buffer.len());
        let descriptor = Descriptor::new(OPERATION, dtype, vec![len]).reducing(op);
        let own = shared(OPERATION, buffer.as_view().into())?;
        if all_reduce::pays(self.world_size(), buffer.num_bytes()) {
            let call = self.next_collective(descriptor);
            let stages = TwoStages::begin(&self.world, &self.channel, call, op, own)?;
            let world = Arc::clone(&self.world);
            return Ok(Work::pending(move || {
                world.progress();
                stages.finish(&mut buffer)
            }));
        }
        let mut exchange = self.collective(descriptor)?;
        for peer in self.peers() {
            exchange.receive(peer, dtype, len)?;
            exchange.send(peer, own.clone())?;
        }
        let rank = self.place.rank;
        Ok(self.pending(exchange, move |parts| {
            let others: Vec<&[u8]> = parts.iter().map(Buffer::host_bytes).collect();
            reduce_in_place(&mut buffer, rank, &others, op)
        }))
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
        let input = shared(OPERATION, input)?;
        let gathered = self.all_gather_shared(input, counts)?;
        let counts = counts.to_vec();
        Ok(Work::pending(move || {
            let parts = gathered.wait()?;
            for (rank, part) in parts.iter().enumerate() {
                write(
                    OPERATION,
                    &mut output,
                    offset(&counts, rank),
                    part.as_view(),
                )?;
            }
            Ok(())
        }))
    }

    fn all_gather_shared(
        &self,
        input: Shared,
        counts: &[usize],
    ) -> Result<Work<'static, Vec<Shared>>> {
        const OPERATION: &str = "all_gather";
        let (dtype, len) = (input.as_view().dtype(), input.as_view().len());
        let rank = self.place.rank;
        self.place.check_counts(OPERATION, counts)?;
        self.place.check_len(OPERATION, counts[rank], len)?;
        let mut exchange = self.collective(Descriptor::new(OPERATION, dtype, counts.to_vec()))?;
        for peer in self.peers() {
            exchange.receive(peer, dtype, counts[peer])?;
            exchange.send(peer, input.clone())?;
        }
        Ok(self.pending(exchange, move |parts| {
            let mut all: Vec<Shared> = parts
                .into_iter()
                .map(|part| Shared::new(Arc::new(part)))
                .collect();
            all.insert(rank, input);
            Ok(all)
        }))
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
        let (rank, dtype) = (self.place.rank, input.as_view().dtype());
        let input = shared(OPERATION, input)?;
        let descriptor = Descriptor::new(OPERATION, dtype, counts.to_vec()).reducing(op);
        let mut exchange = self.collective(descriptor)?;
        let part = |r: usize| {
            let start = offset(counts, r);
            input.slice(start..start + counts[r])
        };
        for peer in self.peers() {
            exchange.receive(peer, dtype, counts[rank])?;
            exchange.send(peer, part(peer))?;
        }
        let own = part(rank);
        Ok(self.pending(exchange, move |parts| {
            let own = own.as_view();
            let mut all: Vec<&[u8]> = parts.iter().map(Buffer::host_bytes).collect();
            all.insert(rank, own.host_bytes().ok_or_else(|| not_host(OPERATION))?);
            reduce_in_rank_order(&mut output, &all, op)
        }))
    }

    fn broadcast<'a>(&self, mut buffer: ViewMut<'a>, root: usize) -> Result<Work<'a>> {
        const OPERATION: &str = "broadcast";
        self.place.check_peer(OPERATION, root)?;
        let (dtype, len) = (buffer.dtype(), buffer.len());
        let mut exchange = self.collective(Descriptor::new(OPERATION, dtype, vec![len, root]))?;
        if self.place.rank == root {
            let own = shared(OPERATION, buffer.as_view().into())?;
            for peer in self.peers() {
                exchange.send(peer, own.clone())?;
            }
        } else {
            exchange.receive(root, dtype, len)?;
        }
        Ok(self.pending(exchange, move |parts| match parts.first() {
            Some(part) => write(OPERATION, &mut buffer, 0, part.as_view()),
            None => Ok(()),
        }))
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
        let (rank, dtype) = (self.place.rank, input.as_view().dtype());
        self.place
            .check_len(OPERATION, receive_counts[rank], send_counts[rank])?;
        let input = shared(OPERATION, input)?;
        let mut exchange = self.collective(Descriptor::new(OPERATION, dtype, Vec::new()))?;
        let part = |r: usize| {
            let start = offset(send_counts, r);
            input.slice(start..start + send_counts[r])
        };
        for peer in self.peers() {
            exchange.receive(peer, dtype, receive_counts[peer])?;
            exchange.send(peer, part(peer))?;
        }
        let (own, counts) = (part(rank), receive_counts.to_vec());
        Ok(self.pending(exchange, move |parts| {
            let mut all: Vec<View<'_>> = parts.iter().map(Buffer::as_view).collect();
            all.insert(rank, own.as_view());
            for (from, part) in all.into_iter().enumerate() {
                write(OPERATION, &mut output, offset(&counts, from), part)?;
            }
            Ok(())
        }))
    }

    fn send(&self, buffer: Buffer, to: usize) -> Result<Work<'static>> {
        const OPERATION: &str = "send";
        self.place.check_peer(OPERATION, to)?;
        let exchange = self.start_send(OPERATION, Shared::new(Arc::new(buffer)), to)?;
        Ok(self.pending(exchange, |_| Ok(())))
    }

    fn receive(&self, dtype: DType, len: usize, from: usize) -> Result<Work<'static, Buffer>> {
        const OPERATION: &str = "receive";
        self.place.check_peer(OPERATION, from)?;
        let exchange = self.start_receive(OPERATION, dtype, len, from)?;
        Ok(self.pending(exchange, move |mut parts| {
            Ok(parts.pop().unwrap_or_else(|| Buffer::zeros(dtype, len)))
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
        self.place.check_peer(OPERATION, to)?;
        self.place.check_peer(OPERATION, from)?;
        let input = shared(OPERATION, input)?;
        let incoming = self.start_receive(OPERATION, output.dtype(), output.len(), from)?;
        let outgoing = self.start_send(OPERATION, input, to)?;
        Ok(self.pending(incoming, move |parts| {
            outgoing.finish()?;
            match parts.first() {
                Some(part) => write(OPERATION, &mut output, 0, part.as_view()),
                None => Ok(()),
            }
        }))
    }

    fn barrier(&self) -> Result<()> {
        let descriptor = Descriptor::new("barrier", DType::U8, Vec::new());
        let mut exchange = self.collective(descriptor)?;
        let nothing = Shared::new(Arc::new(Buffer::U8(Vec::new())));
        for peer in self.peers() {
            exchange.receive(peer, DType::U8, 0)?;
            exchange.send(peer, nothing.clone())?;
        }
        self.pending(exchange, |_| Ok(())).wait()
    }

    fn subgroup(&self, ranks: &[usize], label: &str) -> Result<Arc<dyn Communicator>> {
        let place = self.place.in_subgroup(ranks, label)?;
        Ok(Arc::new(Self::new(Arc::clone(&self.world), place)?))
    }

    fn abort(&self, cause: &Error) {
        self.world.fail(cause);
    }
}

impl fmt::Debug for GlooCommunicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GlooCommunicator")
            .field("rank", &self.place.world_rank())
            .field("group", &self.place.label)
            .field("members", &self.place.members)
            .finish()
    }
}

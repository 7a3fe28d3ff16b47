//! The messages of one operation between this rank and its peers.
//!
//! To each peer goes a frame: what was called, and the part itself where that is small. A larger part follows in a message
//! of its own. A tag names channel, operation and size, so that a message that nobody asked for is never taken for
//! another: gloo ends the process where a message is larger than the memory that waits for it.

use std::{mem, sync::Arc, time::Instant};

use cxx::SharedPtr;
use drivetrain_core::{
    Buffer, DType, Error, ErrorKind, Result,
    communicator::{
        Shared,
        transport::{Call, Descriptor},
    },
};

use crate::{
    frame::{Frame, Heading, INLINE_BYTES},
    shim::ffi,
    store::first_line,
    watch::deadline,
    world::{Channel, Waited, World},
};

/// Messages of one operation to and from every peer that it concerns.
pub(crate) struct Exchange {
    world: Arc<World>,
    channel: Arc<Channel>,
    call: Call,
    route: Route,
    heading: Heading,
    outgoing: Vec<Outgoing>,
    incoming: Vec<Incoming>,
    finished: bool,
}

/// Where messages belong.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Route {
    /// Whether sequence numbers count messages between two ranks, rather than the group's operations.
    pub(crate) between_two: bool,
    /// 0, or 1 in the second stage of an operation.
    pub(crate) stage: u8,
}

struct Outgoing {
    peer: usize,
    // Messages go before the memory that they read.
    messages: Vec<SharedPtr<ffi::Message>>,
    frame: Option<Frame>,
    _part: Shared,
}

struct Incoming {
    peer: usize,
    /// Of a rank's message to itself there is none.
    first: Option<SharedPtr<ffi::Message>>,
    body: Option<SharedPtr<ffi::Message>>,
    frame: Option<Frame>,
    part: Buffer,
}

/// A tag is positive and has 31 bits.
fn tag(channel: u32, route: Route, sequence: u64, body: Option<usize>) -> i32 {
    const SIZES: usize = 127;
    let size = body.map_or(0, |bytes| bytes % SIZES) as u32;
    let part = u32::from(route.stage) * 2 + u32::from(body.is_some());
    let sequence = (sequence % (1 << 11)) as u32;
    let bits = (channel << 21)
        | (u32::from(route.between_two) << 20)
        | (sequence << 9)
        | (part << 7)
        | size;
    bits as i32
}

impl Exchange {
    pub(crate) fn begin(
        world: &Arc<World>,
        channel: &Arc<Channel>,
        call: Call,
        route: Route,
    ) -> Result<Self> {
        world.check()?;
        let heading = match route.between_two {
            true => Heading::message(&call.descriptor, call.sequence),
            false => Heading::of(&call.descriptor, call.sequence),
        };
        Ok(Self {
            world: Arc::clone(world),
            channel: Arc::clone(channel),
            call,
            route,
            heading,
            outgoing: Vec::new(),
            incoming: Vec::new(),
            finished: false,
        })
    }

    fn world_rank(&self, peer: usize) -> i32 {
        self.call.place.members[peer] as i32
    }

    fn tag(&self, body: Option<usize>) -> i32 {
        tag(self.channel.id, self.route, self.call.sequence, body)
    }

    /// Sends a part of host memory to a rank of the group.
    pub(crate) fn send(&mut self, peer: usize, part: Shared) -> Result<()> {
        let view = part.as_view();
        let bytes = view
            .host_bytes()
            .ok_or_else(|| not_host(self.call.descriptor.operation))?;
        if peer == self.call.place.rank {
            self.channel.keep(self.call.sequence, part);
            return Ok(());
        }
        let mut frame = self.world.frame();
        let size = frame.write(&self.heading, bytes);
        let to = self.world_rank(peer);
        let mut messages = Vec::with_capacity(2);
        let mut post = |data: *const u8, size: usize, tag: i32| {
            // SAFETY: the memory is the frame's or the part's, which this struct holds for longer than the message.
            let sent = unsafe { self.world.group.send(data, size, to, tag) };
            sent.map(|message| messages.push(message))
        };
        let mut sent = post(frame.bytes().as_ptr(), size, self.tag(None));
        if sent.is_ok() && bytes.len() > INLINE_BYTES {
            sent = post(bytes.as_ptr(), bytes.len(), self.tag(Some(bytes.len())));
        }
        self.outgoing.push(Outgoing {
            peer,
            messages,
            frame: Some(frame),
            _part: part,
        });
        sent.map_err(|cause| self.gone(peer, first_line(cause.what())))
    }

    /// Receives a part from a rank of the group; [`Self::finish`] gives it.
    pub(crate) fn receive(&mut self, peer: usize, dtype: DType, len: usize) -> Result<()> {
        if peer == self.call.place.rank {
            self.incoming.push(Incoming {
                peer,
                first: None,
                body: None,
                frame: None,
                part: Buffer::zeros(dtype, len),
            });
            return Ok(());
        }
        let from = self.world_rank(peer);
        let mut frame = self.world.frame();
        let mut part = Buffer::zeros(dtype, len);
        let bytes = part.host_bytes_mut();
        let post = |data: &mut [u8], tag: i32| {
            // SAFETY: the memory is the frame's or the part's, on the heap; this struct holds it for longer than the
            // message, and touches it only when the message is done.
            unsafe {
                self.world
                    .group
                    .receive(data.as_mut_ptr(), data.len(), from, tag)
            }
        };
        let first = post(frame.bytes_mut(), self.tag(None));
        let body = (bytes.len() > INLINE_BYTES)
            .then(|| post(bytes, self.tag(Some(bytes.len()))))
            .transpose();
        let posted = first.and_then(|first| body.map(|body| (first, body)));
        let (first, body) = posted.map_err(|cause| self.gone(peer, first_line(cause.what())))?;
        self.incoming.push(Incoming {
            peer,
            first: Some(first),
            body,
            frame: Some(frame),
            part,
        });
        Ok(())
    }

    /// Waits for all messages; what was received, in the order of the calls.
    pub(crate) fn finish(mut self) -> Result<Vec<Buffer>> {
        self.complete()?;
        let incoming = mem::take(&mut self.incoming);
        Ok(incoming.into_iter().map(|incoming| incoming.part).collect())
    }

    fn complete(&mut self) -> Result<()> {
        self.finished = true;
        let outcome = self.wait_for_all();
        self.world.blocked_by(&self.call, None);
        outcome
    }

    fn wait_for_all(&mut self) -> Result<()> {
        let until = deadline(self.call.timeout);
        for i in 0..self.incoming.len() {
            match &self.incoming[i].first {
                Some(first) => self.wait(self.incoming[i].peer, first, until)?,
                None => self.take_own(i)?,
            }
            self.compare(&self.incoming[i])?;
        }
        for i in 0..self.incoming.len() {
            if let Some(body) = &self.incoming[i].body {
                self.wait(self.incoming[i].peer, body, until)?;
            }
            let incoming = &mut self.incoming[i];
            if let Some(frame) = incoming.frame.take() {
                if incoming.body.is_none() {
                    let part = frame.part();
                    incoming.part.host_bytes_mut().copy_from_slice(part);
                }
                self.world.give_back(frame);
            }
        }
        for i in 0..self.outgoing.len() {
            for message in &self.outgoing[i].messages {
                self.wait(self.outgoing[i].peer, message, until)?;
            }
            if let Some(frame) = self.outgoing[i].frame.take() {
                self.world.give_back(frame);
            }
        }
        Ok(())
    }

    /// A message of this rank to itself, which it has sent before it waits.
    fn take_own(&mut self, i: usize) -> Result<()> {
        let part = self.channel.take(self.call.sequence).ok_or_else(|| {
            let message = "this rank waits for a message to itself that it has not sent";
            self.call.error(ErrorKind::Defect, message)
        })?;
        let (sent, own) = (part.as_view(), &mut self.incoming[i].part);
        let (expected, found) = (own.as_view(), sent);
        if (expected.dtype(), expected.len()) != (found.dtype(), found.len()) {
            return Err(self
                .call
                .error(ErrorKind::Defect, "sender and receiver disagree")
                .with(
                    "expected",
                    format!("{} x {}", expected.dtype(), expected.len()),
                )
                .with("found", format!("{} x {}", found.dtype(), found.len())));
        }
        let bytes = sent.host_bytes().unwrap_or_default();
        own.host_bytes_mut().copy_from_slice(bytes);
        Ok(())
    }

    fn wait(&self, peer: usize, message: &SharedPtr<ffi::Message>, until: Instant) -> Result<()> {
        self.world.blocked_by(&self.call, Some(peer));
        match self.world.wait(message, until) {
            Waited::Done => Ok(()),
            Waited::Failed(cause) => Err(cause),
            Waited::Gone(cause) => Err(self.gone(peer, cause)),
            Waited::TimedOut => {
                let missing = self.missing(peer);
                let error = self.world.not_arrived(&self.call, &missing);
                self.world.fail(&error);
                Err(error)
            }
        }
    }

    /// `late` did not come; who else has not?
    fn missing(&self, late: usize) -> Vec<usize> {
        let mut missing: Vec<usize> = self
            .incoming
            .iter()
            .filter(|other| other.peer != late && other.frame.is_some())
            .filter(|other| {
                other
                    .first
                    .as_ref()
                    .is_some_and(|first| !World::is_done(first))
            })
            .map(|other| other.peer)
            .chain([late])
            .collect();
        missing.sort_unstable();
        missing
    }

    fn gone(&self, peer: usize, cause: String) -> Error {
        let rank = self.call.place.members[peer];
        let message = format!("rank {rank} is gone");
        let error = self
            .call
            .error(ErrorKind::RankLost, message)
            .with("missing", format!("[{rank}]"))
            .help("look for the first error of the missing rank, or at what ended its process")
            .caused_by(cause);
        self.world.fail(&error);
        error
    }

    /// What the peer called must be what this rank has called.
    fn compare(&self, incoming: &Incoming) -> Result<()> {
        let Some(frame) = &incoming.frame else {
            return Ok(());
        };
        let (heading, peer) = (frame.heading(), incoming.peer);
        let error = if heading != self.heading {
            match self.route.between_two {
                true => self
                    .call
                    .error(ErrorKind::Defect, "sender and receiver disagree")
                    .with("from", self.call.place.members[peer])
                    .with("expected", &self.heading.text)
                    .with("found", heading.text),
                false => self.call.disagrees(&heading.text, peer),
            }
        } else if frame.part_bytes() != incoming.part.num_bytes() as u64 {
            let size = incoming.part.dtype().size() as u64;
            self.call
                .error(ErrorKind::Defect, "ranks disagree on a count")
                .with("from", self.call.place.members[peer])
                .with("expected", incoming.part.len())
                .with("found", frame.part_bytes() / size)
        } else {
            return Ok(());
        };
        self.world.fail(&error);
        Err(error)
    }
}

/// An operation that is dropped still takes place for the others.
impl Drop for Exchange {
    fn drop(&mut self) {
        if !self.finished {
            // Its failure is the world's, and so the next call's.
            let _ = self.complete();
        }
    }
}

pub(crate) fn not_host(operation: &'static str) -> Error {
    let message = "ranks in processes communicate host memory only";
    Error::new(ErrorKind::Unsupported, operation, message)
}

/// The descriptor of a message.
pub(crate) fn message_of(operation: &'static str, dtype: DType, len: usize) -> Descriptor {
    Descriptor::new(operation, dtype, vec![len])
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn tags_are_positive_and_differ() {
        let mut seen = BTreeSet::new();
        for channel in [0, 1, 1023] {
            for between_two in [false, true] {
                for stage in [0, 1] {
                    let route = Route { between_two, stage };
                    for sequence in [0, 1, 2047] {
                        for body in [None, Some(9000), Some(9001)] {
                            let tag = tag(channel, route, sequence, body);
                            assert!(tag >= 0 && seen.insert(tag));
                        }
                    }
                }
            }
        }
    }
}

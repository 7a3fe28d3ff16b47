//! What thread ranks share: deposits by group and sequence number, and who has left.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use super::buffer::Payload;
use crate::{
    Error, ErrorKind, Result,
    communicator::transport::{Call, Descriptor},
};

/// A call of a group of this world.
#[derive(Debug)]
pub(super) struct GroupCall {
    pub(super) group: usize,
    pub(super) call: Call,
}

impl GroupCall {
    fn key(&self, from: usize) -> Key {
        let call = &self.call;
        (self.group, from, call.place.rank, call.sequence)
    }
}

/// A message: its group, sender, receiver, and number between these.
type Key = (usize, usize, usize, u64);

/// Shared by all ranks and groups of one world: one lock, one condition.
#[derive(Debug, Default)]
pub(super) struct World {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    groups: Vec<Group>,
    /// Groups by parent, members, label, and how many like it the caller made before.
    made: BTreeMap<(Option<usize>, Vec<usize>, String, usize), usize>,
    posted: BTreeMap<Key, Payload>,
    /// Messages whose receive was dropped before they came.
    unwanted: BTreeSet<Key>,
    departed: BTreeSet<usize>,
    aborted: Option<Error>,
}

#[derive(Debug)]
struct Group {
    size: usize,
    slots: BTreeMap<u64, Slot>,
}

#[derive(Debug)]
struct Slot {
    first: (usize, Descriptor),
    deposits: Vec<Option<Arc<Payload>>>,
    collected: usize,
}

impl State {
    fn check(&self) -> Result<()> {
        self.aborted
            .as_ref()
            .map_or(Ok(()), |cause| Err(cause.duplicate().secondary()))
    }
}

impl World {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change below is complete before its guard drops, so a poisoned lock still holds sound state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn group(
        &self,
        parent: Option<usize>,
        members: &[usize],
        label: &str,
        instance: usize,
    ) -> usize {
        let mut state = self.lock();
        let key = (parent, members.to_vec(), label.to_owned(), instance);
        if let Some(&group) = state.made.get(&key) {
            return group;
        }
        let group = state.groups.len();
        state.groups.push(Group {
            size: members.len(),
            slots: BTreeMap::new(),
        });
        state.made.insert(key, group);
        group
    }

    pub(super) fn depart(&self, world_rank: usize) {
        self.lock().departed.insert(world_rank);
        self.changed.notify_all();
    }

    pub(super) fn abort(&self, cause: &Error) {
        self.lock().aborted.get_or_insert_with(|| cause.duplicate());
        self.changed.notify_all();
    }

    fn deposit(&self, call: &GroupCall, payload: Payload) -> Result<()> {
        let mut state = self.lock();
        state.check()?;
        let group = &mut state.groups[call.group];
        let call = &call.call;
        let size = group.size;
        let slot = group.slots.entry(call.sequence).or_insert_with(|| Slot {
            first: (call.place.rank, call.descriptor.clone()),
            deposits: vec![None; size],
            collected: 0,
        });
        if slot.first.1 != call.descriptor {
            let (rank, first) = &slot.first;
            let error = call.disagrees(first, *rank);
            state.aborted = Some(error.duplicate());
            drop(state);
            self.changed.notify_all();
            return Err(error);
        }
        slot.deposits[call.place.rank] = Some(Arc::new(payload));
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Waits until every member has deposited.
    fn collect(&self, call: &GroupCall) -> Result<Vec<Arc<Payload>>> {
        self.wait(call, |state| {
            let slot = state.groups[call.group].slots.get_mut(&call.call.sequence);
            let Some(slot) = slot else {
                return Err((0..call.call.place.members.len()).collect());
            };
            let missing: Vec<usize> = (0..slot.deposits.len())
                .filter(|&r| slot.deposits[r].is_none())
                .collect();
            if !missing.is_empty() {
                return Err(missing);
            }
            let deposits = slot.deposits.iter().flatten().map(Arc::clone).collect();
            slot.collected += 1;
            if slot.collected == slot.deposits.len() {
                state.groups[call.group].slots.remove(&call.call.sequence);
            }
            Ok(deposits)
        })
    }

    /// Whether every member has deposited, so that none waits any more.
    pub(super) fn is_complete(&self, group: usize, sequence: u64) -> bool {
        let state = self.lock();
        let slot = state.groups[group].slots.get(&sequence);
        slot.is_some_and(|slot| slot.deposits.iter().all(Option::is_some))
    }

    /// Counts this rank's part as collected.
    fn skip(&self, call: &GroupCall) {
        let mut state = self.lock();
        let slots = &mut state.groups[call.group].slots;
        if let Some(slot) = slots.get_mut(&call.call.sequence) {
            slot.collected += 1;
            if slot.collected == slot.deposits.len() {
                slots.remove(&call.call.sequence);
            }
        }
    }

    pub(super) fn post(&self, key: Key, payload: Payload) -> Result<()> {
        let mut state = self.lock();
        state.check()?;
        if !state.unwanted.remove(&key) {
            state.posted.insert(key, payload);
        }
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Waits for a point-to-point message.
    fn take_posted(&self, call: &GroupCall, from: usize) -> Result<Payload> {
        let key = call.key(from);
        self.wait(call, |state| {
            state.posted.remove(&key).ok_or_else(|| vec![from])
        })
    }

    /// Throws a message away, now or when it comes.
    fn refuse(&self, key: Key) {
        let mut state = self.lock();
        if state.posted.remove(&key).is_none() {
            state.unwanted.insert(key);
        }
    }

    /// Slots and messages that are still kept for somebody.
    #[cfg(test)]
    pub(super) fn num_kept(&self) -> usize {
        let state = self.lock();
        let slots: usize = state.groups.iter().map(|g| g.slots.len()).sum();
        slots + state.posted.len() + state.unwanted.len()
    }

    /// Tries until it succeeds; `attempt` returns the group's ranks that are missing.
    fn wait<T>(
        &self,
        call: &GroupCall,
        mut attempt: impl FnMut(&mut State) -> std::result::Result<T, Vec<usize>>,
    ) -> Result<T> {
        let deadline = Instant::now() + call.call.timeout;
        let mut state = self.lock();
        loop {
            let missing = match attempt(&mut state) {
                Ok(done) => return Ok(done),
                Err(missing) => missing,
            };
            state.check()?;
            let left = deadline.saturating_duration_since(Instant::now());
            let gone = missing
                .iter()
                .any(|&r| state.departed.contains(&call.call.place.members[r]));
            if left.is_zero() || gone {
                let error = call.call.not_arrived(&missing, &state.departed);
                state.aborted.get_or_insert_with(|| error.duplicate());
                drop(state);
                self.changed.notify_all();
                return Err(error);
            }
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

/// A rank's deposit, and its claim to the others'. Dropped, it frees what is kept for it.
#[derive(Debug)]
pub(super) struct Ticket {
    world: Arc<World>,
    call: GroupCall,
    open: bool,
}

impl Ticket {
    pub(super) fn deposit(world: &Arc<World>, call: GroupCall, payload: Payload) -> Result<Self> {
        world.deposit(&call, payload)?;
        Ok(Self {
            world: Arc::clone(world),
            call,
            open: true,
        })
    }

    /// Waits until every member has deposited.
    pub(super) fn collect(mut self) -> Result<Vec<Arc<Payload>>> {
        self.open = false;
        self.world.collect(&self.call)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.open {
            self.world.skip(&self.call);
        }
    }
}

/// A rank's claim to a message. Dropped, it refuses the message.
#[derive(Debug)]
pub(super) struct Receipt {
    world: Arc<World>,
    call: GroupCall,
    from: usize,
    open: bool,
}

impl Receipt {
    pub(super) fn new(world: &Arc<World>, call: GroupCall, from: usize) -> Self {
        Self {
            world: Arc::clone(world),
            call,
            from,
            open: true,
        }
    }

    /// Whether the message has come.
    pub(super) fn arrival(&self) -> impl Fn() -> bool + Send + use<> {
        let (world, key) = (Arc::clone(&self.world), self.call.key(self.from));
        move || world.lock().posted.contains_key(&key)
    }

    /// Waits for the message, which must be what was expected.
    pub(super) fn take(mut self) -> Result<Payload> {
        self.open = false;
        let payload = self.world.take_posted(&self.call, self.from)?;
        let call = &self.call.call;
        let (dtype, len) = (call.descriptor.dtype, call.descriptor.counts[0]);
        let (found, found_len) = (payload.as_view().dtype(), payload.as_view().len());
        if (found, found_len) == (dtype, len) {
            return Ok(payload);
        }
        Err(call
            .error(ErrorKind::Defect, "sender and receiver disagree")
            .with("from", call.place.members[self.from])
            .with("expected", format!("{dtype} x {len}"))
            .with("found", format!("{found} x {found_len}")))
    }
}

impl Drop for Receipt {
    fn drop(&mut self) {
        if self.open {
            self.world.refuse(self.call.key(self.from));
        }
    }
}

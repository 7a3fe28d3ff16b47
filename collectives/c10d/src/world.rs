//! What a process shares among its groups: the connection, the first failure, and whatever waits.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use cxx::SharedPtr;
use drivetrain_core::{
    Error, ErrorKind, Result,
    communicator::{
        Shared,
        transport::{Call, Calls, Descriptor, Place},
    },
};

use crate::{
    all_reduce::TwoStages,
    frame::Frame,
    shim::ffi,
    store::{Store, first_line, milliseconds},
    watch::{self, Failure},
};

/// How long a rank whose peer has gone waits for the peer's own word.
const LAST_WORDS: Duration = Duration::from_millis(700);

/// How long a rank that keeps the store waits, after a failure, for the others to read it.
const LINGER: Duration = Duration::from_secs(2);

/// Most groups of one rank: their numbers are part of every message's tag.
const MAX_CHANNELS: u32 = 1 << 10;

/// One process's end of the world.
pub(crate) struct World {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) timeout: Duration,
    pub(crate) group: SharedPtr<ffi::Group>,
    /// Whether this process keeps the store.
    keeps_store: bool,
    watched: Arc<Watched>,
    watcher: Mutex<Option<JoinHandle<()>>>,
    channels: Mutex<Channels>,
    stages: Mutex<Vec<Weak<TwoStages>>>,
    frames: Mutex<Vec<Frame>>,
}

/// What the thread that looks for others' failures sees.
pub(crate) struct Watched {
    pub(crate) rank: usize,
    pub(crate) store: Store,
    /// Who keeps the store, for errors.
    pub(crate) keeper: &'static str,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    failed: Option<Error>,
    /// Whether the others know of it.
    published: bool,
    closing: bool,
    /// Messages that some thread waits for.
    waiting: BTreeMap<u64, SharedPtr<ffi::Message>>,
    next: u64,
    blocked: Option<(Instant, watch::Blocked)>,
}

/// What the watching thread is to do next.
pub(crate) enum Duty {
    Publish(Failure),
    Look(Option<(Instant, watch::Blocked)>),
    End,
}

/// How a wait for one message ended.
pub(crate) enum Waited {
    Done,
    /// Another rank, or another thread, has failed.
    Failed(Error),
    TimedOut,
    /// The peer has gone; c10d's text.
    Gone(String),
}

#[derive(Debug, Default)]
struct Channels {
    next: u32,
    open: BTreeMap<(Vec<usize>, String), Arc<Channel>>,
}

/// A group's number in tags, and what this rank has called in it.
#[derive(Debug)]
pub(crate) struct Channel {
    pub(crate) id: u32,
    pub(crate) calls: Mutex<Calls>,
    /// Messages of this rank to itself, by their number.
    to_self: Mutex<BTreeMap<u64, Shared>>,
}

impl Channel {
    pub(crate) fn keep(&self, sequence: u64, part: Shared) {
        lock(&self.to_self).insert(sequence, part);
    }

    pub(crate) fn take(&self, sequence: u64) -> Option<Shared> {
        lock(&self.to_self).remove(&sequence)
    }
}

impl World {
    pub(crate) fn new(
        place: &Place,
        timeout: Duration,
        group: SharedPtr<ffi::Group>,
        store: Store,
        keeps_store: bool,
        keeper: &'static str,
    ) -> Result<Arc<Self>> {
        let watched = Arc::new(Watched {
            rank: place.rank,
            store,
            keeper,
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        let thread = thread::Builder::new().name(format!("rank-{}-watch", place.rank));
        let seen = Arc::clone(&watched);
        let watcher = thread.spawn(move || watch::watch(&seen)).map_err(|cause| {
            Error::new(ErrorKind::Device, "meet", "no thread to be had").caused_by(cause)
        })?;
        Ok(Arc::new(Self {
            rank: place.rank,
            size: place.members.len(),
            timeout,
            group,
            keeps_store,
            watched,
            watcher: Mutex::new(Some(watcher)),
            channels: Mutex::default(),
            stages: Mutex::default(),
            frames: Mutex::default(),
        }))
    }

    /// The first failure, if there is any.
    pub(crate) fn check(&self) -> Result<()> {
        self.watched.check()
    }

    /// Fails every pending and later call of this rank, and leaves word for the others.
    pub(crate) fn fail(&self, cause: &Error) {
        self.watched.fail(cause, false);
    }

    /// Waits for one message.
    pub(crate) fn wait(&self, message: &SharedPtr<ffi::Message>, deadline: Instant) -> Waited {
        let id = {
            let mut state = self.watched.lock();
            if let Some(cause) = &state.failed {
                return Waited::Failed(cause.duplicate().secondary());
            }
            state.next += 1;
            let id = state.next;
            state.waiting.insert(id, message.clone());
            id
        };
        let left = deadline.saturating_duration_since(Instant::now());
        let outcome = message.wait(milliseconds(left));
        self.watched.lock().waiting.remove(&id);
        match outcome {
            Ok(true) => Waited::Done,
            Ok(false) => match self.check() {
                Err(cause) => Waited::Failed(cause),
                Ok(()) => Waited::Gone("the wait was ended".to_owned()),
            },
            Err(cause) if cause.what().contains("Timed out") => Waited::TimedOut,
            Err(cause) => match self.watched.last_words() {
                Some(other) => Waited::Failed(other),
                None => Waited::Gone(first_line(cause.what())),
            },
        }
    }

    /// Whether a message is there already.
    pub(crate) fn is_done(message: &SharedPtr<ffi::Message>) -> bool {
        matches!(message.wait(1), Ok(true))
    }

    /// Says for whom this rank waits, so that another that waits for it can name the one that all wait for.
    pub(crate) fn blocked_by(&self, call: &Call, peer: Option<usize>) {
        let blocked = peer.map(|peer| {
            let blocked = watch::Blocked {
                by: call.place.members[peer],
                operation: call.descriptor.operation.to_owned(),
                group: call.place.label.clone(),
                sequence: call.sequence,
            };
            (Instant::now(), blocked)
        });
        self.watched.lock().blocked = blocked;
    }

    /// The error of an operation for which these ranks of the group did not come in time: it names those for whom
    /// the others wait too.
    pub(crate) fn not_arrived(&self, call: &Call, missing: &[usize]) -> Error {
        let members = &call.place.members;
        let world: BTreeSet<usize> = missing.iter().map(|&r| members[r]).collect();
        let (causes, waiting) = watch::find_causes(&self.watched.store, self.rank, &world);
        if waiting.is_empty() {
            return call.not_arrived(missing, &BTreeSet::new());
        }
        let waits: Vec<String> = waiting.iter().map(ToString::to_string).collect();
        call.late(&causes).with("waiting", waits.join("; "))
    }

    /// A frame's memory, used again.
    pub(crate) fn frame(&self) -> Frame {
        lock(&self.frames).pop().unwrap_or_else(Frame::new)
    }

    pub(crate) fn give_back(&self, frame: Frame) {
        lock(&self.frames).push(frame);
    }

    /// Registers an operation of two stages, whose second others may need before this rank waits for it.
    pub(crate) fn register(&self, stages: &Arc<TwoStages>) {
        let mut all = lock(&self.stages);
        all.retain(|stages| stages.strong_count() > 0);
        all.push(Arc::downgrade(stages));
    }

    /// Begins the second stage of every operation that has one, in the order in which they were begun. Called before
    /// each wait: whoever this rank is about to wait for may wait for one of these.
    pub(crate) fn progress(&self) {
        let all = lock(&self.stages).clone();
        for stages in all.iter().filter_map(Weak::upgrade) {
            stages.advance();
        }
    }

    /// The channel of a group: the same number on all its members, which no two groups of a rank share. A group that
    /// was made before goes on where it was.
    pub(crate) fn channel(&self, place: &Place) -> Result<Arc<Channel>> {
        let mut channels = lock(&self.channels);
        let key = (place.members.clone(), place.label.clone());
        if let Some(channel) = channels.open.get(&key) {
            return Ok(Arc::clone(channel));
        }
        let id = match place.members.len() == self.size && channels.open.is_empty() {
            true => 0,
            false => self.agree_on_channel(place, channels.next)?,
        };
        if id >= MAX_CHANNELS {
            let message = "this rank is in too many groups";
            return Err(Error::new(ErrorKind::Unsupported, "subgroup", message)
                .with("rank", self.rank)
                .with("expected", format!("at most {MAX_CHANNELS}")));
        }
        channels.next = id + 1;
        let channel = Arc::new(Channel {
            id,
            calls: Mutex::default(),
            to_self: Mutex::default(),
        });
        channels.open.insert(key, Arc::clone(&channel));
        Ok(channel)
    }

    /// The largest of the members' next free numbers.
    fn agree_on_channel(&self, place: &Place, free: u32) -> Result<u32> {
        const OPERATION: &str = "subgroup";
        self.check()?;
        let store = self
            .watched
            .store
            .under(&format!("channel/{}/{:?}", place.label, place.members));
        store.set(&self.rank.to_string(), &free.to_le_bytes())?;
        let keys: Vec<String> = place.members.iter().map(ToString::to_string).collect();
        let deadline = Instant::now() + self.timeout;
        loop {
            // In slices, to see a failure.
            let slice = deadline.min(Instant::now() + Duration::from_millis(100));
            match store.get_all(&keys, slice)? {
                Ok(all) => {
                    let numbers = all
                        .iter()
                        .filter_map(|bytes| Some(u32::from_le_bytes(bytes[..].try_into().ok()?)));
                    return Ok(numbers.max().unwrap_or(free));
                }
                Err(_) if Instant::now() < deadline => self.check()?,
                Err(missing) => {
                    let descriptor =
                        Descriptor::new(OPERATION, drivetrain_core::DType::U8, Vec::new());
                    let call = Call {
                        place: place.clone(),
                        sequence: 0,
                        descriptor,
                        timeout: self.timeout,
                    };
                    let error = self.not_arrived(&call, &missing);
                    self.fail(&error);
                    return Err(error);
                }
            }
        }
    }
}

impl Watched {
    pub(crate) fn lock_duty(&self, period: Duration) -> Duty {
        let mut state = self.lock();
        if state.failed.is_none() && !state.closing {
            state = self
                .changed
                .wait_timeout(state, period)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        match &state.failed {
            Some(cause) if !state.published => {
                let failure = Failure::of(self.rank, cause);
                state.published = true;
                Duty::Publish(failure)
            }
            _ if state.closing => Duty::End,
            Some(_) => {
                // Nothing to look for any more, but the end.
                let end = self.changed.wait_timeout(state, period);
                drop(end.unwrap_or_else(PoisonError::into_inner));
                Duty::Look(None)
            }
            None => Duty::Look(state.blocked.clone()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn check(&self) -> Result<()> {
        match &self.lock().failed {
            Some(cause) => Err(cause.duplicate().secondary()),
            None => Ok(()),
        }
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.lock().failed.is_some()
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.lock().closing
    }

    /// `known`: whether the others know of it without this rank's word.
    pub(crate) fn fail(&self, cause: &Error, known: bool) {
        let mut state = self.lock();
        if state.failed.is_none() {
            state.failed = Some(cause.duplicate());
            state.published = known;
        }
        for message in state.waiting.values() {
            // A message that is done already has nothing to abort.
            let _ = message.abort();
        }
        drop(state);
        self.changed.notify_all();
    }

    /// What the others say within a moment of a peer's going: often it has said why.
    fn last_words(&self) -> Option<Error> {
        let deadline = Instant::now() + LAST_WORDS;
        let mut state = self.lock();
        loop {
            if let Some(cause) = &state.failed {
                return Some(cause.duplicate().secondary());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.watched.lock().closing = true;
        self.watched.changed.notify_all();
        if let Some(watcher) = lock(&self.watcher).take() {
            // It has published what there was to publish.
            let _ = watcher.join();
        }
        let store = &self.watched.store;
        let mut gone = store.add("gone", 1);
        if !self.keeps_store {
            return;
        }
        let patience = match self.watched.has_failed() {
            true => LINGER,
            false => self.timeout,
        };
        let deadline = Instant::now() + patience;
        while matches!(gone, Ok(n) if n < self.size as i64) && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
            gone = store.add("gone", 0);
        }
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World")
            .field("rank", &self.rank)
            .field("size", &self.size)
            .finish()
    }
}

/// What is behind these locks is sound after any panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

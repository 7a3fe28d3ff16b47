//! Worlds whose ranks are threads of this process, each with a connection of its own: what runs over processes, under a
//! test that sees all its ranks.

use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use drivetrain_core::{Error, ErrorKind, Result, communicator::Communicator};

use crate::{
    communicator::GlooCommunicator,
    rendezvous::{Rendezvous, connect},
    store::Store,
    world::lock,
};

/// Time for the ranks of a world to meet.
const MEETING: Duration = Duration::from_secs(120);

/// What one rank does.
pub type RankMain<'a> = &'a (dyn Fn(Arc<dyn Communicator>) -> Result<()> + Sync);

/// Worlds that are used again until something fails in them, since meeting takes time.
#[derive(Debug, Default)]
pub struct Worlds {
    /// By size and timeout.
    idle: Mutex<BTreeMap<(usize, Duration), Vec<World>>>,
}

/// The ends of one world, and the store at which they met.
#[derive(Debug)]
struct World {
    ends: Vec<Arc<GlooCommunicator>>,
    _store: Store,
}

impl World {
    fn meet(size: usize, timeout: Duration) -> Result<Self> {
        let store = Store::serve(0, MEETING)?;
        let port = store.port();
        let ends: Vec<Result<Arc<GlooCommunicator>>> = thread::scope(|scope| {
            let ranks: Vec<_> = (0..size)
                .map(|rank| {
                    scope.spawn(move || {
                        connect(&Rendezvous {
                            rank,
                            world_size: size,
                            host: "127.0.0.1".to_owned(),
                            port,
                            launcher_keeps_store: true,
                            name: "one_process".to_owned(),
                            meeting_timeout: MEETING,
                            timeout,
                            interface: None,
                        })
                    })
                })
                .collect();
            let joined = ranks.into_iter().map(|rank| rank.join());
            joined
                .map(|rank| rank.unwrap_or_else(|_| Err(panicked())))
                .collect()
        });
        Ok(Self {
            ends: ends.into_iter().collect::<Result<_>>()?,
            _store: store,
        })
    }
}

impl Worlds {
    /// Runs a body on every rank of a world of this size.
    ///
    /// # Errors
    /// The first cause, as [`drivetrain_core::launch::run_ranks`]; those of meeting.
    pub fn run(&self, size: usize, timeout: Duration, body: RankMain<'_>) -> Result<()> {
        let key = (size, timeout);
        let idle = lock(&self.idle).get_mut(&key).and_then(Vec::pop);
        let world = idle.map_or_else(|| World::meet(size, timeout), Ok)?;
        run(&world, body)?;
        lock(&self.idle).entry(key).or_default().push(world);
        Ok(())
    }
}

/// Runs a body on every rank of a world of its own.
///
/// # Errors
/// As [`Worlds::run`].
pub fn run_once(size: usize, timeout: Duration, body: RankMain<'_>) -> Result<()> {
    run(&World::meet(size, timeout)?, body)
}

fn run(world: &World, body: RankMain<'_>) -> Result<()> {
    let first: Mutex<Option<Error>> = Mutex::default();
    thread::scope(|scope| {
        for end in &world.ends {
            let first = &first;
            scope.spawn(move || {
                let outcome = catch_unwind(AssertUnwindSafe(|| body(end.clone())));
                let Err(error) = outcome.unwrap_or_else(|_| Err(panicked())) else {
                    return;
                };
                end.abort(&error);
                let mut first = lock(first);
                let better = |kept: &Error| kept.is_secondary() && !error.is_secondary();
                if first.as_ref().is_none_or(better) {
                    *first = Some(error);
                }
            });
        }
    });
    lock(&first).take().map_or(Ok(()), Err)
}

fn panicked() -> Error {
    Error::new(ErrorKind::RankLost, "run_rank", "a rank panicked")
}

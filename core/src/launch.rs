//! Where ranks are: threads of this process, or processes of which this is one.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use crate::{
    Error, ErrorKind, Result,
    communicator::{Communicator, LocalCommunicator, LocalOptions},
};

/// Where the ranks of a job are.
#[derive(Debug, Clone, Default)]
pub enum Ranks {
    /// Threads of this process, as many as the job asks for.
    #[default]
    Threads,
    /// Processes, of which this is one: its end of their world.
    Process(Arc<dyn Communicator>),
}

impl Ranks {
    /// Whether rank 0 is in this process: it alone writes files and speaks to people.
    pub fn is_first(&self) -> bool {
        match self {
            Self::Threads => true,
            Self::Process(world) => world.rank() == 0,
        }
    }

    /// Runs `rank_main` on every rank of this process, and returns what each returned, in rank order. A rank that fails
    /// or panics ends the others at their next operation. `timeout` is for threads; processes have theirs.
    ///
    /// # Errors
    /// The first cause; where this process is a rank, its own error, which may be the echo of another's. `Config` if
    /// there are not as many processes as ranks.
    pub fn run<T, F>(&self, world_size: usize, timeout: Duration, rank_main: F) -> Result<Vec<T>>
    where
        T: Send,
        F: Fn(Arc<dyn Communicator>) -> Result<T> + Sync,
    {
        let world = match self {
            Self::Threads => return run_ranks(world_size, timeout, rank_main),
            Self::Process(world) => world,
        };
        let rank = world.rank();
        let checked = match world.world_size() == world_size {
            true => Ok(()),
            false => Err(Error::new(
                ErrorKind::Config,
                "run_ranks",
                "a job has another number of ranks than there are processes",
            )
            .with("expected", format!("{world_size} ranks (parallel)"))
            .with("found", format!("{} processes", world.world_size()))
            .help("start as many processes as the sizes of `parallel` multiply to")),
        };
        let outcome = checked.and_then(|()| {
            catch_unwind(AssertUnwindSafe(|| rank_main(world.clone())))
                .unwrap_or_else(|panic| Err(panicked(rank, &*panic)))
        });
        match outcome {
            Ok(value) => Ok(vec![value]),
            Err(error) => {
                let error = error.with("rank", rank);
                world.abort(&error);
                Err(error)
            }
        }
    }

    /// What every rank does before the run, which fails on all if on any.
    ///
    /// # Errors
    /// The outcome's; on the other ranks one that names this rank and quotes its error.
    pub fn agree<T>(&self, operation: &'static str, outcome: Result<T>) -> Result<T> {
        match self {
            Self::Threads => outcome,
            Self::Process(world) => world.agree(operation, outcome),
        }
    }

    /// Rank 0's number, on every rank.
    ///
    /// # Errors
    /// Communicator errors.
    pub fn from_first(&self, number: u64) -> Result<u64> {
        let Self::Process(world) = self else {
            return Ok(number);
        };
        let mut bits = [number as i64];
        world.broadcast((&mut bits[..]).into(), 0)?.wait()?;
        Ok(bits[0] as u64)
    }
}

/// Runs `rank_main` on `world_size` threads, each with its end of a world, and returns what each returned, in
/// rank order. A rank that fails or panics ends the others at their next operation.
///
/// # Errors
/// The first cause: of the ranks that failed by themselves, and not because another had, the error (or panic,
/// as `RankLost`) of the one that failed first.
pub fn run_ranks<T, F>(world_size: usize, timeout: Duration, rank_main: F) -> Result<Vec<T>>
where
    T: Send,
    F: Fn(Arc<dyn Communicator>) -> Result<T> + Sync,
{
    let ends = LocalCommunicator::world(world_size, LocalOptions { timeout });
    let first: Mutex<Option<Error>> = Mutex::default();
    let outcomes: Vec<Option<T>> = std::thread::scope(|scope| {
        let threads: Vec<_> = ends
            .iter()
            .map(|end| {
                let (rank_main, first) = (&rank_main, &first);
                let rank = end.rank();
                let body = move || {
                    let outcome = catch_unwind(AssertUnwindSafe(|| rank_main(end.clone())));
                    let result = outcome.unwrap_or_else(|panic| Err(panicked(rank, &*panic)));
                    match result {
                        Ok(value) => {
                            end.depart();
                            Some(value)
                        }
                        Err(error) => {
                            let error = error.with("rank", rank);
                            end.abort(&error);
                            keep(first, error);
                            None
                        }
                    }
                };
                std::thread::Builder::new()
                    .name(format!("rank-{rank}"))
                    .spawn_scoped(scope, body)
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| match thread {
                Ok(thread) => thread.join().ok().flatten(),
                Err(cause) => {
                    let error = Error::new(ErrorKind::Device, "start_rank", "no thread to be had")
                        .caused_by(cause);
                    ends[0].abort(&error);
                    keep(&first, error);
                    None
                }
            })
            .collect()
    });
    match first.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(outcomes.into_iter().flatten().collect()),
    }
}

/// Keeps the first error, or the first that is not another's echo.
fn keep(first: &Mutex<Option<Error>>, error: Error) {
    let mut first = first.lock().unwrap_or_else(PoisonError::into_inner);
    if first
        .as_ref()
        .is_none_or(|kept| kept.is_secondary() && !error.is_secondary())
    {
        *first = Some(error);
    }
}

fn panicked(rank: usize, panic: &(dyn Any + Send)) -> Error {
    let message = panic
        .downcast_ref::<&str>()
        .map(|s| (*s).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned());
    Error::new(
        ErrorKind::RankLost,
        "run_rank",
        format!("a rank panicked: {message}"),
    )
    .with("rank", rank)
    .help("this is a defect: please report it with the message above")
}

//! Ranks as threads of this process.

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

//! Work of one rank that may go on beside its training.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
};

use crate::{Error, ErrorKind, Result};

/// Work that is done, or that a thread of its own does. Dropped unfinished, it is told to stop and waited for, so that
/// nothing is written behind the back of whoever gave it up.
pub(super) struct Task<T> {
    state: Option<State<T>>,
    cancel: Arc<AtomicBool>,
}

enum State<T> {
    Done(Result<T>),
    Running(JoinHandle<Result<T>>),
}

impl<T: Send + 'static> Task<T> {
    /// Work that is done.
    pub(super) fn done(outcome: Result<T>) -> Self {
        Self {
            state: Some(State::Done(outcome)),
            cancel: Arc::default(),
        }
    }

    /// Starts work, which looks now and then whether it is to stop.
    pub(super) fn spawn(work: impl FnOnce(&AtomicBool) -> Result<T> + Send + 'static) -> Self {
        let cancel = Arc::<AtomicBool>::default();
        let flag = Arc::clone(&cancel);
        let thread = std::thread::Builder::new()
            .name("checkpoint".to_owned())
            .spawn(move || work(&flag));
        let state = match thread {
            Ok(thread) => State::Running(thread),
            Err(cause) => State::Done(Err(Error::new(
                ErrorKind::Device,
                "write_checkpoint",
                "no thread to be had",
            )
            .caused_by(cause))),
        };
        Self {
            state: Some(state),
            cancel,
        }
    }

    /// Whether [`Self::join`] does not block.
    pub(super) fn is_finished(&self) -> bool {
        match &self.state {
            Some(State::Running(thread)) => thread.is_finished(),
            _ => true,
        }
    }

    /// Its outcome.
    pub(super) fn join(mut self) -> Result<T> {
        let defect = |message: &str| Error::new(ErrorKind::Defect, "write_checkpoint", message);
        match self.state.take() {
            Some(State::Done(outcome)) => outcome,
            Some(State::Running(thread)) => thread
                .join()
                .unwrap_or_else(|_| Err(defect("the thread that writes a checkpoint panicked"))),
            None => Err(defect("the outcome of a save was taken twice")),
        }
    }
}

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        if let Some(State::Running(thread)) = self.state.take() {
            self.cancel.store(true, Ordering::Relaxed);
            // Nobody asks for its outcome any more.
            drop(thread.join());
        }
    }
}

impl<T> fmt::Debug for Task<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let running = matches!(&self.state, Some(State::Running(_)));
        f.debug_struct("Task").field("running", &running).finish()
    }
}

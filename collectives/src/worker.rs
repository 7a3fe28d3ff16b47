//! A thread that makes a group's calls, which may block until other members make theirs.

use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc},
    time::Duration,
};

use drivetrain_core::{Error, ErrorKind, Result};

use crate::{Collective, Group};

/// The way to a group's thread, which ends with the last handle and after the last call.
#[derive(Debug, Clone)]
pub(crate) struct Worker {
    calls: mpsc::Sender<Call>,
    group: Arc<dyn Group>,
}

#[derive(Debug)]
struct Call {
    collective: Collective,
    input: Vec<f32>,
    outcome: Arc<Outcome>,
}

/// What becomes of a call.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    output: Mutex<Option<Result<Vec<f32>>>>,
    there: Condvar,
}

impl Worker {
    /// # Errors
    /// `Device` if there is no thread to be had.
    pub(crate) fn start(group: Arc<dyn Group>) -> Result<Self> {
        let (calls, queue) = mpsc::channel::<Call>();
        let runner = Arc::clone(&group);
        std::thread::Builder::new()
            .name("collectives".to_owned())
            .spawn(move || {
                for call in queue {
                    let output = runner.run(&call.collective, &call.input);
                    call.outcome.put(output);
                }
            })
            .map_err(|cause| {
                let message = "no thread for collectives to be had";
                Error::new(ErrorKind::Device, "subgroup", message).caused_by(cause)
            })?;
        Ok(Self { calls, group })
    }

    /// Queues an operation.
    pub(crate) fn call(&self, collective: Collective, input: Vec<f32>) -> Arc<Outcome> {
        let outcome = Arc::new(Outcome::default());
        let call = Call {
            collective,
            input,
            outcome: Arc::clone(&outcome),
        };
        if self.calls.send(call).is_err() {
            let message = "the thread of collectives has ended";
            outcome.put(Err(Error::new(ErrorKind::Defect, "collective", message)));
        }
        outcome
    }

    pub(crate) fn abort(&self) {
        self.group.abort();
    }
}

impl Outcome {
    fn put(&self, output: Result<Vec<f32>>) {
        *self.lock() = Some(output);
        self.there.notify_all();
    }

    pub(crate) fn is_there(&self) -> bool {
        self.lock().is_some()
    }

    /// `None` where it did not come in time.
    pub(crate) fn take(&self, timeout: Duration) -> Option<Result<Vec<f32>>> {
        let absent = |output: &mut Option<_>| output.is_none();
        let waited = self.there.wait_timeout_while(self.lock(), timeout, absent);
        let (mut output, _) = waited.unwrap_or_else(PoisonError::into_inner);
        output.take()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Result<Vec<f32>>>> {
        self.output.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

//! A started operation.

use std::fmt;

use tracing::Span;

use crate::Result;

/// A started operation that borrows its views until it is waited for, and then gives what it received.
///
/// One that is dropped instead still takes place for the other members, and leaves the group as if it had been waited
/// for; what this rank's outputs hold is not said. (A transport that still reads or writes them waits in the drop.)
#[must_use = "an operation ends in wait()"]
pub struct Work<'a, T = ()> {
    state: State<'a, T>,
}

enum State<'a, T> {
    Done(T),
    Pending {
        ready: Box<dyn Fn() -> bool + Send + 'a>,
        finish: Box<dyn FnOnce() -> Result<T> + Send + 'a>,
    },
}

impl Work<'_> {
    /// An operation that is already done.
    pub fn done() -> Self {
        Self {
            state: State::Done(()),
        }
    }
}

impl<'a, T> Work<'a, T> {
    /// An operation that `finish` completes (and for which it may block, up to the timeout). What is to happen if it
    /// is dropped instead, `finish` does as it is dropped.
    pub fn pending(finish: impl FnOnce() -> Result<T> + Send + 'a) -> Self {
        Self::polled(|| false, finish)
    }

    /// As [`Self::pending`], of a transport that can say whether `finish` would block.
    pub fn polled(
        ready: impl Fn() -> bool + Send + 'a,
        finish: impl FnOnce() -> Result<T> + Send + 'a,
    ) -> Self {
        Self {
            state: State::Pending {
                ready: Box::new(ready),
                finish: Box::new(finish),
            },
        }
    }

    /// The same, whose wait is in a span that ends with it.
    pub(super) fn within(self, span: Span) -> Self
    where
        T: 'a,
    {
        match self.state {
            State::Pending { ready, finish } if !span.is_none() => Self {
                state: State::Pending {
                    ready,
                    // Moved in: the span ends here, or where this is dropped unused.
                    finish: Box::new(move || span.in_scope(finish)),
                },
            },
            state => Self { state },
        }
    }

    /// Whether [`Self::wait`] is known not to block: a chance to finish early, never a duty.
    pub fn is_ready(&self) -> bool {
        match &self.state {
            State::Done(_) => true,
            State::Pending { ready, .. } => ready(),
        }
    }

    /// Blocks the host until outputs may be read and the views are free.
    ///
    /// # Errors
    /// The operation's failure.
    pub fn wait(self) -> Result<T> {
        match self.state {
            State::Done(value) => Ok(value),
            State::Pending { finish, .. } => finish(),
        }
    }
}

impl<T> fmt::Debug for Work<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work")
            .field("pending", &matches!(self.state, State::Pending { .. }))
            .finish()
    }
}

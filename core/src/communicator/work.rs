//! A started operation.

use std::fmt;

use crate::Result;

/// A started operation that borrows its buffers until it is waited for.
#[must_use = "an operation ends in wait()"]
pub struct Work<'a> {
    finish: Option<Box<dyn FnOnce() -> Result<()> + Send + 'a>>,
}

impl<'a> Work<'a> {
    /// An operation that is already done.
    pub fn done() -> Self {
        Self { finish: None }
    }

    /// An operation that `finish` completes (and for which it may block, up to the timeout).
    pub fn pending(finish: impl FnOnce() -> Result<()> + Send + 'a) -> Self {
        Self {
            finish: Some(Box::new(finish)),
        }
    }

    /// Blocks the host until the output may be read and the buffers are free.
    ///
    /// # Errors
    /// The operation's failure.
    pub fn wait(mut self) -> Result<()> {
        match self.finish.take() {
            Some(finish) => finish(),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Work<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work")
            .field("pending", &self.finish.is_some())
            .finish()
    }
}

//! A look at every operation before it starts: to count, to delay, to fail.

use std::{fmt, sync::Arc, time::Duration};

use tracing::Span;

use super::{Communicator, Input, ReduceOp, Shared, Work};
use crate::{Buffer, DType, Error, Result, ViewMut};

/// What is done before each operation of a communicator.
pub trait Intercept: fmt::Debug + Send + Sync + 'static {
    /// `group` is about to start `operation` on `bytes`: those of the whole buffer (the gathered output, the input of a
    /// reduction or an exchange).
    ///
    /// # Errors
    /// Its own; then the operation is not started.
    fn before(&self, group: &dyn Communicator, operation: &'static str, bytes: usize)
    -> Result<()>;

    /// A span of the operation: entered while the rank starts it and while it waits for it, closed at its end.
    fn span(&self, _group: &dyn Communicator, _operation: &'static str, _bytes: usize) -> Span {
        Span::none()
    }
}

/// A communicator with a hook before its operations and those of all its subgroups.
#[derive(Debug)]
pub struct Intercepted<I> {
    inner: Arc<dyn Communicator>,
    hook: Arc<I>,
}

impl<I: Intercept> Intercepted<I> {
    /// Puts a hook before a communicator.
    pub fn new(inner: Arc<dyn Communicator>, hook: Arc<I>) -> Self {
        Self { inner, hook }
    }

    /// Starts an operation, after what the hook does before it, in the span that the hook gives it.
    fn start<'a, T: 'a>(
        &self,
        operation: &'static str,
        bytes: usize,
        start: impl FnOnce(&dyn Communicator) -> Result<Work<'a, T>>,
    ) -> Result<Work<'a, T>> {
        self.hook.before(&*self.inner, operation, bytes)?;
        let span = self.hook.span(&*self.inner, operation, bytes);
        let work = span.in_scope(|| start(&*self.inner))?;
        Ok(work.within(span))
    }
}

impl<I: Intercept> Communicator for Intercepted<I> {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn members(&self) -> &[usize] {
        self.inner.members()
    }

    fn label(&self) -> &str {
        self.inner.label()
    }

    fn timeout(&self) -> Duration {
        self.inner.timeout()
    }

    fn all_reduce<'a>(&self, buffer: ViewMut<'a>, op: ReduceOp) -> Result<Work<'a>> {
        self.start("all_reduce", buffer.num_bytes(), |inner| {
            inner.all_reduce(buffer, op)
        })
    }

    fn all_gather<'a>(
        &self,
        input: Input<'a>,
        output: ViewMut<'a>,
        counts: &[usize],
    ) -> Result<Work<'a>> {
        self.start("all_gather", output.num_bytes(), |inner| {
            inner.all_gather(input, output, counts)
        })
    }

    fn all_gather_shared(
        &self,
        input: Shared,
        counts: &[usize],
    ) -> Result<Work<'static, Vec<Shared>>> {
        let bytes = counts.iter().sum::<usize>() * input.as_view().dtype().size();
        self.start("all_gather", bytes, |inner| {
            inner.all_gather_shared(input, counts)
        })
    }

    fn reduce_scatter<'a>(
        &self,
        input: Input<'a>,
        output: ViewMut<'a>,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<Work<'a>> {
        self.start("reduce_scatter", input.as_view().num_bytes(), |inner| {
            inner.reduce_scatter(input, output, counts, op)
        })
    }

    fn broadcast<'a>(&self, buffer: ViewMut<'a>, root: usize) -> Result<Work<'a>> {
        self.start("broadcast", buffer.num_bytes(), |inner| {
            inner.broadcast(buffer, root)
        })
    }

    fn all_to_all<'a>(
        &self,
        input: Input<'a>,
        send_counts: &[usize],
        output: ViewMut<'a>,
        receive_counts: &[usize],
    ) -> Result<Work<'a>> {
        self.start("all_to_all", input.as_view().num_bytes(), |inner| {
            inner.all_to_all(input, send_counts, output, receive_counts)
        })
    }

    fn send(&self, buffer: Buffer, to: usize) -> Result<Work<'static>> {
        self.start("send", buffer.num_bytes(), |inner| inner.send(buffer, to))
    }

    fn receive(&self, dtype: DType, len: usize, from: usize) -> Result<Work<'static, Buffer>> {
        self.start("receive", len * dtype.size(), |inner| {
            inner.receive(dtype, len, from)
        })
    }

    fn exchange<'a>(
        &self,
        input: Input<'a>,
        to: usize,
        output: ViewMut<'a>,
        from: usize,
    ) -> Result<Work<'a>> {
        self.start("exchange", input.as_view().num_bytes(), |inner| {
            inner.exchange(input, to, output, from)
        })
    }

    fn barrier(&self) -> Result<()> {
        let barrier = |inner: &dyn Communicator| inner.barrier().map(|()| Work::done());
        self.start("barrier", 0, barrier)?.wait()
    }

    fn subgroup(&self, ranks: &[usize], label: &str) -> Result<Arc<dyn Communicator>> {
        Ok(Arc::new(Self {
            inner: self.inner.subgroup(ranks, label)?,
            hook: Arc::clone(&self.hook),
        }))
    }

    fn abort(&self, cause: &Error) {
        self.inner.abort(cause);
    }
}

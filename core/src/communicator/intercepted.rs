//! A look at every operation before it starts: to count, to delay, to fail.

use std::{fmt, sync::Arc, time::Duration};

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

    fn before(&self, operation: &'static str, bytes: usize) -> Result<()> {
        self.hook.before(&*self.inner, operation, bytes)
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
        self.before("all_reduce", buffer.num_bytes())?;
        self.inner.all_reduce(buffer, op)
    }

    fn all_gather<'a>(
        &self,
        input: Input<'a>,
        output: ViewMut<'a>,
        counts: &[usize],
    ) -> Result<Work<'a>> {
        self.before("all_gather", output.num_bytes())?;
        self.inner.all_gather(input, output, counts)
    }

    fn all_gather_shared(
        &self,
        input: Shared,
        counts: &[usize],
    ) -> Result<Work<'static, Vec<Shared>>> {
        let bytes = counts.iter().sum::<usize>() * input.as_view().dtype().size();
        self.before("all_gather", bytes)?;
        self.inner.all_gather_shared(input, counts)
    }

    fn reduce_scatter<'a>(
        &self,
        input: Input<'a>,
        output: ViewMut<'a>,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<Work<'a>> {
        self.before("reduce_scatter", input.as_view().num_bytes())?;
        self.inner.reduce_scatter(input, output, counts, op)
    }

    fn broadcast<'a>(&self, buffer: ViewMut<'a>, root: usize) -> Result<Work<'a>> {
        self.before("broadcast", buffer.num_bytes())?;
        self.inner.broadcast(buffer, root)
    }

    fn all_to_all<'a>(
        &self,
        input: Input<'a>,
        send_counts: &[usize],
        output: ViewMut<'a>,
        receive_counts: &[usize],
    ) -> Result<Work<'a>> {
        self.before("all_to_all", input.as_view().num_bytes())?;
        self.inner
            .all_to_all(input, send_counts, output, receive_counts)
    }

    fn send(&self, buffer: Buffer, to: usize) -> Result<Work<'static>> {
        self.before("send", buffer.num_bytes())?;
        self.inner.send(buffer, to)
    }

    fn receive(&self, dtype: DType, len: usize, from: usize) -> Result<Work<'static, Buffer>> {
        self.before("receive", len * dtype.size())?;
        self.inner.receive(dtype, len, from)
    }

    fn exchange<'a>(
        &self,
        input: Input<'a>,
        to: usize,
        output: ViewMut<'a>,
        from: usize,
    ) -> Result<Work<'a>> {
        self.before("exchange", input.as_view().num_bytes())?;
        self.inner.exchange(input, to, output, from)
    }

    fn barrier(&self) -> Result<()> {
        self.before("barrier", 0)?;
        self.inner.barrier()
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

//! A communicator whose rank is lost at a chosen operation.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use drivetrain_core::{
    Error, ErrorKind, Result, View, ViewMut,
    communicator::{Communicator, ReduceOp, Work},
};

/// Counts operations down once armed; at zero the rank is lost: every member's calls fail from then on.
#[derive(Debug, Clone)]
pub struct FaultyCommunicator {
    inner: Arc<dyn Communicator>,
    world: Arc<dyn Communicator>,
    left: Arc<AtomicI64>,
}

/// Far from zero: not armed.
const NEVER: i64 = i64::MAX / 2;

impl FaultyCommunicator {
    /// Around a world, not armed.
    pub fn new(world: Arc<dyn Communicator>) -> Self {
        Self {
            inner: world.clone(),
            world,
            left: Arc::new(AtomicI64::new(NEVER)),
        }
    }

    /// Lets `operations` more pass, on the world and all its subgroups together.
    pub fn arm(&self, operations: i64) {
        self.left.store(operations, Ordering::SeqCst);
    }

    /// Whether the rank was lost.
    pub fn struck(&self) -> bool {
        self.left.load(Ordering::SeqCst) < 0
    }

    fn pass(&self, operation: &'static str) -> Result<()> {
        if self.left.fetch_sub(1, Ordering::SeqCst) > 0 {
            return Ok(());
        }
        self.left.store(-1, Ordering::SeqCst);
        let error = Error::new(
            ErrorKind::RankLost,
            operation,
            "the rank is lost, as planned",
        )
        .with("rank", self.world.rank());
        self.inner.abort(&error);
        self.world.abort(&error);
        Err(error)
    }
}

impl Communicator for FaultyCommunicator {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn label(&self) -> &str {
        self.inner.label()
    }

    fn timeout(&self) -> Duration {
        self.inner.timeout()
    }

    fn all_reduce<'a>(&self, buffer: ViewMut<'a>, op: ReduceOp) -> Result<Work<'a>> {
        self.pass("all_reduce")?;
        self.inner.all_reduce(buffer, op)
    }

    fn all_gather<'a>(
        &self,
        input: View<'a>,
        output: ViewMut<'a>,
        counts: &[usize],
    ) -> Result<Work<'a>> {
        self.pass("all_gather")?;
        self.inner.all_gather(input, output, counts)
    }

    fn reduce_scatter<'a>(
        &self,
        input: View<'a>,
        output: ViewMut<'a>,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<Work<'a>> {
        self.pass("reduce_scatter")?;
        self.inner.reduce_scatter(input, output, counts, op)
    }

    fn broadcast<'a>(&self, buffer: ViewMut<'a>, root: usize) -> Result<Work<'a>> {
        self.pass("broadcast")?;
        self.inner.broadcast(buffer, root)
    }

    fn all_to_all<'a>(
        &self,
        input: View<'a>,
        send_counts: &[usize],
        output: ViewMut<'a>,
        receive_counts: &[usize],
    ) -> Result<Work<'a>> {
        self.pass("all_to_all")?;
        self.inner
            .all_to_all(input, send_counts, output, receive_counts)
    }

    fn send<'a>(&self, input: View<'a>, to: usize) -> Result<Work<'a>> {
        self.pass("send")?;
        self.inner.send(input, to)
    }

    fn receive<'a>(&self, output: ViewMut<'a>, from: usize) -> Result<Work<'a>> {
        self.pass("receive")?;
        self.inner.receive(output, from)
    }

    fn barrier(&self) -> Result<()> {
        self.pass("barrier")?;
        self.inner.barrier()
    }

    fn subgroup(&self, ranks: &[usize], label: &str) -> Result<Arc<dyn Communicator>> {
        Ok(Arc::new(Self {
            inner: self.inner.subgroup(ranks, label)?,
            world: self.world.clone(),
            left: self.left.clone(),
        }))
    }

    fn abort(&self, cause: &Error) {
        self.inner.abort(cause);
    }
}

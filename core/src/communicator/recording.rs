//! Counts what passes through a communicator, by axis and operation.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use indexmap::IndexMap;
use serde::Serialize;

use super::{Communicator, ReduceOp, Work};
use crate::{Error, Result, View, ViewMut};

/// Calls and bytes of one operation on one axis.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct CollectiveStats {
    /// Number of calls of this rank.
    pub calls: u64,
    /// Bytes of the whole buffer (the gathered output, the input of a reduction), summed over calls.
    pub bytes: u64,
}

type Log = Arc<Mutex<IndexMap<(String, &'static str), CollectiveStats>>>;

/// A communicator that counts its calls and those of its subgroups.
#[derive(Debug)]
pub struct RecordingCommunicator {
    inner: Arc<dyn Communicator>,
    log: Log,
}

impl RecordingCommunicator {
    /// Wraps a communicator, with nothing counted yet.
    pub fn new(inner: Arc<dyn Communicator>) -> Self {
        Self {
            inner,
            log: Log::default(),
        }
    }

    /// What was counted so far: (label of the group, operation) to calls and bytes, in order of first use.
    pub fn stats(&self) -> IndexMap<(String, &'static str), CollectiveStats> {
        self.log
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Counts from nothing again.
    pub fn reset(&self) {
        self.log
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clear();
    }

    fn count(&self, operation: &'static str, bytes: usize) {
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        let stats = log
            .entry((self.inner.label().to_owned(), operation))
            .or_default();
        stats.calls += 1;
        stats.bytes += bytes as u64;
    }
}

impl Communicator for RecordingCommunicator {
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
        self.count("all_reduce", buffer.num_bytes());
        self.inner.all_reduce(buffer, op)
    }

    fn all_gather<'a>(
        &self,
        input: View<'a>,
        output: ViewMut<'a>,
        counts: &[usize],
    ) -> Result<Work<'a>> {
        self.count("all_gather", output.num_bytes());
        self.inner.all_gather(input, output, counts)
    }

    fn reduce_scatter<'a>(
        &self,
        input: View<'a>,
        output: ViewMut<'a>,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<Work<'a>> {
        self.count("reduce_scatter", input.num_bytes());
        self.inner.reduce_scatter(input, output, counts, op)
    }

    fn broadcast<'a>(&self, buffer: ViewMut<'a>, root: usize) -> Result<Work<'a>> {
        self.count("broadcast", buffer.num_bytes());
        self.inner.broadcast(buffer, root)
    }

    fn all_to_all<'a>(
        &self,
        input: View<'a>,
        send_counts: &[usize],
        output: ViewMut<'a>,
        receive_counts: &[usize],
    ) -> Result<Work<'a>> {
        self.count("all_to_all", input.num_bytes());
        self.inner
            .all_to_all(input, send_counts, output, receive_counts)
    }

    fn send<'a>(&self, input: View<'a>, to: usize) -> Result<Work<'a>> {
        self.count("send", input.num_bytes());
        self.inner.send(input, to)
    }

    fn receive<'a>(&self, output: ViewMut<'a>, from: usize) -> Result<Work<'a>> {
        self.count("receive", output.num_bytes());
        self.inner.receive(output, from)
    }

    fn barrier(&self) -> Result<()> {
        self.count("barrier", 0);
        self.inner.barrier()
    }

    fn subgroup(&self, ranks: &[usize], label: &str) -> Result<Arc<dyn Communicator>> {
        let inner = self.inner.subgroup(ranks, label)?;
        Ok(Arc::new(Self {
            inner,
            log: Arc::clone(&self.log),
        }))
    }

    fn abort(&self, cause: &Error) {
        self.inner.abort(cause);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::run_ranks;

    #[test]
    fn counts_by_axis() {
        run_ranks(2, Duration::from_secs(20), |comm| {
            let recorder = RecordingCommunicator::new(comm);
            let axis = recorder.subgroup(&[0, 1], "data_shard")?;
            axis.sum_f64(&mut [1.0, 2.0])?;
            axis.sum_f64(&mut [1.0])?;
            recorder.barrier()?;
            let stats = recorder.stats();
            let all_reduce = stats[&("data_shard".to_owned(), "all_reduce")];
            assert_eq!(
                all_reduce,
                CollectiveStats {
                    calls: 2,
                    bytes: 24
                }
            );
            assert_eq!(stats[&("world".to_owned(), "barrier")].calls, 1);
            Ok(())
        })
        .unwrap();
    }
}

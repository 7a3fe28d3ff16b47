//! Counts what passes through a communicator, by axis and operation.

use std::sync::{Mutex, PoisonError};

use indexmap::IndexMap;
use serde::Serialize;

use super::{Communicator, Intercept};
use crate::Result;

/// Calls and bytes of one operation on one axis.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct CollectiveStats {
    /// Number of calls of this rank.
    pub calls: u64,
    /// Bytes of the whole buffer (the gathered output, the input of a reduction), summed over calls.
    pub bytes: u64,
}

/// Counts the calls of a communicator and of its subgroups: the hook of an [`Intercepted`](super::Intercepted).
#[derive(Debug, Default)]
pub struct Recorder {
    log: Mutex<IndexMap<(String, &'static str), CollectiveStats>>,
}

impl Recorder {
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
}

impl Intercept for Recorder {
    fn before(
        &self,
        group: &dyn Communicator,
        operation: &'static str,
        bytes: usize,
    ) -> Result<()> {
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        let stats = log
            .entry((group.label().to_owned(), operation))
            .or_default();
        stats.calls += 1;
        stats.bytes += bytes as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use super::*;
    use crate::{communicator::Intercepted, launch::run_ranks};

    #[test]
    fn counts_by_axis() {
        run_ranks(2, Duration::from_secs(20), |comm| {
            let recorder = Arc::new(Recorder::default());
            let comm = Intercepted::new(comm, recorder.clone());
            let axis = comm.subgroup(&[0, 1], "data_shard")?;
            axis.sum_f64(&mut [1.0, 2.0])?;
            axis.sum_f64(&mut [1.0])?;
            comm.barrier()?;
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

//! One rank's call of one operation, and its errors.

use std::{collections::BTreeSet, fmt, time::Duration};

use super::Place;
use crate::{DType, Error, ErrorKind, communicator::ReduceOp};

/// What every member of an operation must agree on.
#[derive(Debug, Clone, PartialEq)]
pub struct Descriptor {
    /// Its name.
    pub operation: &'static str,
    /// Element type.
    pub dtype: DType,
    /// Elements by rank, or of all.
    pub counts: Vec<usize>,
    /// How elements combine.
    pub op: Option<ReduceOp>,
}

impl Descriptor {
    /// Of an operation that reduces nothing.
    pub fn new(operation: &'static str, dtype: DType, counts: Vec<usize>) -> Self {
        Self {
            operation,
            dtype,
            counts,
            op: None,
        }
    }

    /// Of one that reduces.
    #[must_use]
    pub fn reducing(mut self, op: ReduceOp) -> Self {
        self.op = Some(op);
        self
    }

    /// Bytes of all elements.
    pub fn bytes(&self) -> usize {
        self.counts.iter().sum::<usize>() * self.dtype.size()
    }
}

impl fmt::Display for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} of {} x {:?}",
            self.operation, self.dtype, self.counts
        )?;
        self.op.map_or(Ok(()), |op| write!(f, " ({op:?})"))
    }
}

/// One rank's call of one operation.
#[derive(Debug, Clone)]
pub struct Call {
    /// Whose.
    pub place: Place,
    /// Which of the group's operations, or of the messages between two ranks, counted from 1.
    pub sequence: u64,
    /// What is called.
    pub descriptor: Descriptor,
    /// How long it may take.
    pub timeout: Duration,
}

impl Call {
    /// An error that names rank, group, sequence number and size.
    pub fn error(&self, kind: ErrorKind, message: impl Into<String>) -> Error {
        Error::new(kind, self.descriptor.operation, message)
            .with("rank", self.place.world_rank())
            .with("group", &self.place.label)
            .with("sequence", self.sequence)
            .with("bytes", self.descriptor.bytes())
    }

    /// These ranks of the group did not come; of `departed` ranks of the world it is known that they never will.
    pub fn not_arrived(&self, missing: &[usize], departed: &BTreeSet<usize>) -> Error {
        let missing: Vec<usize> = missing.iter().map(|&r| self.place.members[r]).collect();
        let gone: Vec<usize> = missing
            .iter()
            .copied()
            .filter(|r| departed.contains(r))
            .collect();
        let (kind, message) = if gone.is_empty() {
            let seconds = self.timeout.as_secs_f64();
            (
                ErrorKind::Timeout,
                format!("ranks {missing:?} did not arrive within {seconds} s"),
            )
        } else {
            (
                ErrorKind::RankLost,
                format!("ranks {gone:?} have left and will not arrive"),
            )
        };
        self.error(kind, message)
            .with("missing", format!("{missing:?}"))
            .help(
                "look for the first error of the missing ranks; every rank must call the same \
                 operations in the same order",
            )
    }

    /// Another member called something else at this place.
    pub fn disagrees(&self, other: impl fmt::Display, rank: usize) -> Error {
        self.error(ErrorKind::Defect, "ranks disagree on an operation")
            .with("found", &self.descriptor)
            .with(
                "expected",
                format!("{other} (called by rank {})", self.place.members[rank]),
            )
    }
}

//! One rank's call of one operation, and its errors.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    time::Duration,
};

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

/// What a rank has called so far in a group; the others' counts must match.
#[derive(Debug, Default)]
pub struct Calls {
    collectives: u64,
    sends: BTreeMap<usize, u64>,
    receives: BTreeMap<usize, u64>,
}

impl Calls {
    /// The number of its next operation of the whole group, counted from 1.
    pub fn next_collective(&mut self) -> u64 {
        self.collectives += 1;
        self.collectives
    }

    /// The number of its next message to a rank of the group.
    pub fn next_send(&mut self, to: usize) -> u64 {
        let count = self.sends.entry(to).or_default();
        *count += 1;
        *count
    }

    /// The number of the next message from a rank of the group.
    pub fn next_receive(&mut self, from: usize) -> u64 {
        let count = self.receives.entry(from).or_default();
        *count += 1;
        *count
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
        match gone.is_empty() {
            true => self.late(&missing),
            false => {
                let message = format!("ranks {gone:?} have left and will not arrive");
                self.missing(ErrorKind::RankLost, message, &missing)
            }
        }
    }

    /// These ranks of the world did not come in time.
    pub fn late(&self, missing: &[usize]) -> Error {
        let seconds = self.timeout.as_secs_f64();
        let message = format!("ranks {missing:?} did not arrive within {seconds} s");
        self.missing(ErrorKind::Timeout, message, missing)
    }

    fn missing(&self, kind: ErrorKind, message: String, missing: &[usize]) -> Error {
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

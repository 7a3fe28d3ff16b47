//! What is asked of a library.

use std::fmt;

use drivetrain_core::Result;

/// By what the members of a new group find each other: the first one makes it and tells the others.
pub type GroupId = [u8; 128];

/// An operation of all members of a group, on f32. Counts are elements, by member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Collective {
    /// The sum of every member's input, for all.
    AllReduce,
    /// Every member's input, one after the other, for all.
    AllGather {
        /// What each gives.
        counts: Vec<usize>,
    },
    /// The sum of every member's input, a part for each.
    ReduceScatter {
        /// What each gets.
        counts: Vec<usize>,
    },
    /// One member's input, for all.
    Broadcast {
        /// Whose.
        root: usize,
    },
    /// A part of every member's input for every other.
    AllToAll {
        /// What this one gives to each.
        send_counts: Vec<usize>,
        /// What it gets from each.
        receive_counts: Vec<usize>,
    },
}

impl Collective {
    /// As [`Communicator`](drivetrain_core::communicator::Communicator) calls it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllGather { .. } => "all_gather",
            Self::ReduceScatter { .. } => "reduce_scatter",
            Self::Broadcast { .. } => "broadcast",
            Self::AllToAll { .. } => "all_to_all",
        }
    }

    /// Elements that member `rank` gets for an input of so many.
    pub fn output_len(&self, rank: usize, input: usize) -> usize {
        match self {
            Self::AllReduce | Self::Broadcast { .. } => input,
            Self::AllGather { counts } => counts.iter().sum(),
            Self::ReduceScatter { counts } => counts[rank],
            Self::AllToAll { receive_counts, .. } => receive_counts.iter().sum(),
        }
    }
}

/// The members of a group as a library has them. Its calls come from one thread, in the same order on all members;
/// [`Group::abort`] from any.
pub trait Group: fmt::Debug + Send + Sync {
    /// Runs an operation to its end and returns this member's output.
    ///
    /// # Errors
    /// `Device`: the library's, or that the group was aborted.
    fn run(&self, collective: &Collective, input: &[f32]) -> Result<Vec<f32>>;

    /// Makes a call under way, and every later one, end with an error.
    fn abort(&self);
}

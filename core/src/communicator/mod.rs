//! Collective operations among ranks.
//!
//! Ranks run SPMD: every member of a group calls the same operations in the same order. Each operation starts
//! at the call and ends in [`Work::wait`]; views are borrowed until then. Inputs are borrowed or shared
//! ([`Input`]). Reductions add in rank order, so every member gets the same bits.
//!
//! Messages from one rank to one other are matched by their order alone, whichever of [`Communicator::send`],
//! [`Communicator::receive`] and [`Communicator::exchange`] they pass through. Waiting for a send may take until
//! the message is received; so a ring of ranks that all send and then receive does not end on every transport, and
//! exchanges instead.

mod agree;
mod intercepted;
mod local;
mod recording;
mod shared;
mod traced;
pub mod transport;
mod work;

pub use intercepted::{Intercept, Intercepted};
pub use local::{LocalCommunicator, LocalOptions};
pub use recording::{CollectiveStats, Recorder};
pub use shared::{Input, Shared, SharedBuffer};
pub use traced::Traced;
pub use work::Work;

use std::{fmt, sync::Arc, time::Duration};

use crate::{Buffer, DType, Error, Result, ViewMut};

/// How elements combine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReduceOp {
    /// The sum, accumulated in the buffer's dtype (f32 for bf16 and f16, rounded once).
    Sum,
    /// The largest; a NaN wins.
    Max,
    /// The smallest; a NaN wins.
    Min,
}

/// A process group: a set of ranks that communicate.
///
/// Errors of every operation name rank, operation, sequence number, size and the ranks that did not arrive,
/// and come within [`Self::timeout`]; ranks in errors are those of the world. After an error or an [`Self::abort`]
/// every member's calls fail.
///
/// Views of host memory are always accepted, whatever device the ranks compute on: losses, metrics and agreements
/// are on the host. All members of an operation pass memory of the same kind.
pub trait Communicator: Send + Sync + fmt::Debug {
    /// This rank's index in the group.
    fn rank(&self) -> usize;

    /// Number of members.
    fn world_size(&self) -> usize;

    /// The members' ranks in the world, by their rank in the group.
    fn members(&self) -> &[usize];

    /// What the group is for (an axis name, `world`); shown in errors and recordings.
    fn label(&self) -> &str;

    /// How long an operation may take.
    fn timeout(&self) -> Duration;

    /// Reduces the buffer over all members, in place. All counts are equal.
    fn all_reduce<'a>(&self, buffer: ViewMut<'a>, op: ReduceOp) -> Result<Work<'a>>;

    /// Concatenates every member's input in rank order. `counts[r]` elements come from rank r; 0 is legal.
    fn all_gather<'a>(
        &self,
        input: Input<'a>,
        output: ViewMut<'a>,
        counts: &[usize],
    ) -> Result<Work<'a>>;

    /// Every member's input, in rank order; `counts[r]` elements are rank r's. Nothing is borrowed: the operation may
    /// be under way while other work goes on, and its outcome is put where it belongs when that is needed.
    fn all_gather_shared(
        &self,
        input: Shared,
        counts: &[usize],
    ) -> Result<Work<'static, Vec<Shared>>>;

    /// Reduces the input over all members and leaves rank r with its `counts[r]` elements; 0 is legal.
    fn reduce_scatter<'a>(
        &self,
        input: Input<'a>,
        output: ViewMut<'a>,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<Work<'a>>;

    /// Copies the root's buffer to every member.
    fn broadcast<'a>(&self, buffer: ViewMut<'a>, root: usize) -> Result<Work<'a>>;

    /// Sends `send_counts[r]` elements to each rank r and receives `receive_counts[r]` from it, in rank order.
    fn all_to_all<'a>(
        &self,
        input: Input<'a>,
        send_counts: &[usize],
        output: ViewMut<'a>,
        receive_counts: &[usize],
    ) -> Result<Work<'a>>;

    /// Sends a buffer to one rank. It is given away: between thread ranks it is the one that is received.
    fn send(&self, buffer: Buffer, to: usize) -> Result<Work<'static>>;

    /// Receives a buffer of `len` elements from one rank.
    fn receive(&self, dtype: DType, len: usize, from: usize) -> Result<Work<'static, Buffer>>;

    /// Sends to one rank and receives from one, which may be the same, as one operation: a step of a ring.
    fn exchange<'a>(
        &self,
        input: Input<'a>,
        to: usize,
        output: ViewMut<'a>,
        from: usize,
    ) -> Result<Work<'a>>;

    /// Waits for every member.
    fn barrier(&self) -> Result<()>;

    /// A group of these ranks of this group, in this order. Every member of the new group calls it with the
    /// same list, in the same order of calls; members that are not in the list do not call.
    fn subgroup(&self, ranks: &[usize], label: &str) -> Result<Arc<dyn Communicator>>;

    /// Makes every pending and later call of every member fail with this cause.
    fn abort(&self, cause: &Error);
}

impl dyn Communicator + '_ {
    /// The sum of a few numbers over all members, the same bits on each.
    ///
    /// # Errors
    /// As the communicator's.
    pub fn sum_f64(&self, values: &mut [f64]) -> Result<()> {
        self.all_reduce(values.into(), ReduceOp::Sum)?.wait()
    }
}

//! What the transports of this library share, and a stranger's may use: what a call must satisfy by itself, what
//! all members must agree on, the errors that follow, and reductions in rank order.

mod call;
mod place;
mod reduce;

pub use call::{Call, Calls, Descriptor};
pub use place::{Place, offset};
pub use reduce::{reduce_in_place, reduce_in_rank_order};

//! Fully sharded data parallelism: units, their shards, and the collectives between them.
//!
//! A unit is a block, or the root (embedding, final norm and head). Between uses each rank holds a dim-0 shard of
//! every parameter; `gather` makes the unit whole, [`ShardGroup::reshard`] gives that memory back between forward and
//! backward, and `reduce` sums the ranks' gradients into shards. Both are started and finished, so that what is
//! computed in between hides them.

mod gather;
mod gathered;
mod group;
mod layout;
mod reduce;
mod unit;

pub(crate) use gather::Gathering;
#[cfg(test)]
pub(crate) use gathered::Residents;
pub(crate) use gathered::{Event, Gathered};
pub(crate) use group::{Dtypes, ShardGroup};
pub(crate) use layout::UnitLayout;
pub(crate) use reduce::Reducing;
pub(crate) use unit::Unit;

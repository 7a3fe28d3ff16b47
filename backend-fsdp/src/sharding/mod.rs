//! Fully sharded data parallelism: units, their shards, and the collectives between them.
//!
//! A unit is a block, or the root (embedding, final norm and head). Between uses each rank holds a dim-0 shard of
//! every parameter; [`ShardGroup::gather`] makes the unit whole, [`Gathered::free`] gives that memory back, and
//! [`ShardGroup::reduce`] sums the ranks' gradients into shards.

mod gathered;
mod group;
mod layout;
mod unit;

pub(crate) use gathered::Gathered;
#[cfg(test)]
pub(crate) use gathered::Residents;
pub(crate) use group::ShardGroup;
pub(crate) use layout::UnitLayout;
pub(crate) use unit::Unit;

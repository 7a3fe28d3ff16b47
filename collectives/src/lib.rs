//! Collectives that run on devices.
//!
//! [`Offloaded`] is a [`Communicator`](drivetrain_core::communicator::Communicator) over two others: one of the host,
//! which every rank has, and a [`Group`] for each set of ranks, of a library that moves floats from device to device
//! (NCCL). Sums, gathers and exchanges among all members of f32 go through the group; all else (f64 losses and metrics,
//! agreements, largest and smallest, messages of one rank to one other) goes through the host.
//!
//! Before an operation of the group counts as begun, the host's communicator has seen every member arrive with the
//! same call. So errors are the host's: a rank that does not come is named within the timeout, an abort reaches
//! everyone, and what disagrees is a defect with both numbers. The library, which can do none of this, is told to give up.
//!
//! Tested by the suite of communicators over a library that is none (`tests/communicator.rs`). Over NCCL it has never run.
//!
//! Read `group.rs` (what is asked of a library), `worker.rs` (its calls block, so a thread makes them), `offloaded.rs`.
#![forbid(unsafe_code)]

mod group;
mod offloaded;
mod worker;

pub use group::{Collective, Group, GroupId};
pub use offloaded::{Offloaded, Open};

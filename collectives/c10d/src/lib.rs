//! Ranks in processes of their own, over libtorch's c10d.
//!
//! [`connect`] meets the other ranks at a TCPStore, connects to each by Gloo, and gives this rank's
//! [`Communicator`](drivetrain_core::communicator::Communicator). [`environment`] finds out from a launcher's variables
//! (torchrun, Slurm, Open MPI) which rank this process is.
//!
//! Of Gloo only messages between two ranks are used; collectives are made of these here. So reductions add in rank order
//! and have the bits that thread ranks have, every operation begins with what all members must agree on, the ranks that
//! did not come are known by name, and an abort ends whatever waits. A rank that fails leaves word at the store, where
//! each looks a few times a second; the others end with its error.
//!
//! Read `rendezvous.rs` (how ranks meet), `world.rs` (what a process shares: failure and waiting), `exchange.rs` (the
//! messages of one operation), `communicator.rs` (operations made of them), `all_reduce.rs` (the one of two stages).

mod all_reduce;
mod communicator;
pub mod environment;
mod exchange;
mod frame;
pub mod in_one_process;
mod rendezvous;
mod shim;
mod store;
mod watch;
mod world;

pub use communicator::GlooCommunicator;
pub use rendezvous::{Rendezvous, connect};
pub use store::Store;
pub use watch::announce_loss;

//! The crate as its users see it.

mod batches;
mod desk;
mod faults;
mod hub;
mod lines;
mod options;
mod text;

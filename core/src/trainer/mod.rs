//! The training loop.

mod source;

pub use source::{BatchSource, CyclicSource};

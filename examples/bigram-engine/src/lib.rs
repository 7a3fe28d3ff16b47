//! An engine in a crate of its own, which nothing of Drivetrain knows: what a stranger writes.
//!
//! It trains bigram models: a Llama with no layers is `head(norm(embedding(token)))`, so that a token's
//! distribution depends on the one before it alone. It claims one family, one rank, f32, and gradients; a rule
//! of its own refuses models with layers. `tests/conformance.rs` runs the suite on it: it is asked for what it
//! claims, and must refuse the rest.
#![forbid(unsafe_code)]

mod backend;
mod engine;
mod model;

pub use backend::BigramBackend;

//! Engine `fsdp`: fully sharded data parallelism (Zhao et al. 2023) over libtorch.
//!
//! Every parameter is cut along dim 0 over the data-parallel ranks, which hold f32 masters, gradients and moments of
//! their part alone. A unit (a block; or embedding, final norm and head) is made whole before it is used, freed after
//! its forward pass, made whole again before its backward pass, and its gradient is summed into the parts.
//!
//! Reading order: `engine` (the step), `microbatch` (gather, forward, free; gather, backward, reduce), `overlap` (what is
//! communicated meanwhile), `sharding` (the collectives and who holds what), `model` (the transformer), `router`
//! (what trains a choice of experts), `optimizer`, and `shim` for what libtorch's Rust
//! binding lacks. What each option does and costs: [`manual`].

mod asked;
mod backend;
mod checkpoint;
mod device;
mod engine;
mod error;
mod host;
#[doc = include_str!("manual.md")]
pub mod manual {}
mod microbatch;
mod model;
mod optimizer;
mod options;
mod overlap;
mod plan;
mod router;
mod sharding;
mod shim;
#[cfg(test)]
mod tests;
mod units;
mod warm_up;
mod weights;

pub use backend::Fsdp;

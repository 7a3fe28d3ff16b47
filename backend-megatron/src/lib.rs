//! The `megatron` engine: a transformer whose every module has an explicit forward, which returns its output
//! and what backward needs, and an explicit backward. No autograd, no libtorch.
//!
//! A rank has chunks of layers and of each its part (tensor, expert), computes on its rows of the tokens (data, context,
//! sequence) and hands activations to the next stage. Weights lie in flat buckets in the engine's own layout (q, k and v
//! as one matrix, gate and up as one) that `weights` maps to Hugging Face names. Whatever ranks hold the same weights
//! share their gradients, masters and moments: Megatron's distributed optimizer.
//!
//! Where to read: `backend.rs` (builds and declares), `engine.rs` (the step), `pass.rs` (micro-batches through the
//! schedule), `model.rs` and `modules/` (the maths), `ranks.rs` and a folder an axis, `optimizer.rs`, `checkpoint.rs`.
//!
//! Shape legend: B sequences, T packed tokens of this context rank, S of these in the residual stream of this tensor
//! rank, N scored positions, D model, H query heads, K key/value heads, E head dim, F feed-forward, V vocabulary, X
//! experts; H, K, F, V and X in modules are this rank's.
#![forbid(unsafe_code)]

mod backend;
mod checkpoint;
mod context_parallel;
mod data_parallel;
mod device;
mod engine;
mod expert_parallel;
mod microbatch;
mod model;
mod modules;
#[cfg(feature = "cuda")]
mod nccl;
mod optimizer;
mod options;
mod packed;
mod pass;
mod pipeline_parallel;
mod plan;
#[cfg(test)]
mod poisoned;
mod ranks;
mod score;
mod sequence_parallel;
mod tensor_parallel;
mod weights;
mod workspace;

pub use backend::Megatron;
#[doc(hidden)]
pub use backend::MegatronOn;

//! The `megatron` engine: a transformer whose every module has an explicit forward, which returns its output
//! and what backward needs, and an explicit backward. No autograd, no libtorch.
//!
//! Weights lie in flat buckets in the engine's own layout (q, k and v as one matrix, gate and up as one) that
//! `weights` maps to Hugging Face names. Data-parallel ranks hold all weights; gradients are reduce-scattered
//! bucket by bucket, each rank updates its share with its own moments, and the shares are gathered again:
//! Megatron's distributed optimizer.
//!
//! Where to read: `backend.rs` (builds and declares), `engine.rs` (the step), `model.rs` and `modules/` (the
//! maths), `data_parallel/`, `optimizer.rs`, `checkpoint.rs`.
//!
//! Shape legend: B sequences, T packed tokens, N scored positions, D model, H query heads, K key/value heads,
//! E head dim, F feed-forward, V vocabulary; `local_` for a rank's share.
#![forbid(unsafe_code)]

mod backend;
mod checkpoint;
mod context_parallel;
mod data_parallel;
mod engine;
mod microbatch;
mod model;
mod modules;
mod optimizer;
mod packed;
mod pass;
mod pipeline_parallel;
mod plan;
mod ranks;
mod score;
mod sequence_parallel;
mod tensor_parallel;
mod weights;
mod workspace;

pub use backend::Megatron;

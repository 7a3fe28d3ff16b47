//! The ops on a device: the functions of [`crate::ops`] by the same names, over device memory.
//!
//! They give work to the device's stream and return; a fault of a kernel shows up in a later call. Shapes
//! that do not fit panic as on the CPU. What a CPU function checks inside its buffers (ids, positions,
//! targets) a device cannot: there it becomes NaN, as each says.

#[path = "../ops/adamw/cuda.rs"]
pub mod adamw;
#[path = "../ops/attention/cuda.rs"]
pub mod attention;
#[path = "../ops/cross_entropy/cuda.rs"]
pub mod cross_entropy;
#[path = "../ops/elementwise/cuda.rs"]
pub mod elementwise;
#[path = "../ops/embedding/cuda.rs"]
pub mod embedding;
#[path = "../ops/gemm/cuda.rs"]
pub mod gemm;
#[path = "../ops/linear/cuda.rs"]
pub mod linear;
#[path = "../ops/permute/cuda.rs"]
pub mod permute;
#[path = "../ops/rms_norm/cuda.rs"]
pub mod rms_norm;
#[path = "../ops/rope/cuda.rs"]
pub mod rope;
#[path = "../ops/router/cuda.rs"]
pub mod router;
#[path = "../ops/swiglu/cuda.rs"]
pub mod swiglu;

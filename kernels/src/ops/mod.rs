//! The ops, a folder each.

pub mod adamw;
pub mod attention;
pub mod cross_entropy;
pub mod elementwise;
pub mod embedding;
pub mod gemm;
pub mod grouped_gemm;
pub mod linear;
pub mod permute;
pub mod rms_norm;
pub mod rope;
pub mod router;
pub mod swiglu;

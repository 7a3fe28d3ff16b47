//! Rotary position embedding (Su et al. 2021) in the half-split order of GPT-NeoX and Hugging Face.
//!
//! In place on x `[T, heads, E]`, possibly a band of a wider buffer. With c = `cos[p, i]`, s = `sin[p, i]` for
//! the token's position p and i < E/2:
//!
//! ```text
//! x[i]       <- x[i] c - x[i + E/2] s
//! x[i + E/2] <- x[i + E/2] c + x[i] s
//! ```
//!
//! Backward is the inverse rotation (times the same factor, if the tables carry one). Tables
//! `[positions, E/2]` are computed in f64 and stored as f32. No scratch.

mod cpu;
pub mod reference;
#[cfg(test)]
mod tests;

use crate::cuda::ops::rope as device;
use crate::{On, RowsMut, check};

/// Shape of the rotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RopeDims {
    /// T.
    pub tokens: usize,
    /// H or K.
    pub heads: usize,
    /// E, even.
    pub head_dim: usize,
}

/// cos and sin of position * `inv_freq[i]`, times `factor` (YaRN's attention factor; 1 otherwise).
///
/// inv_freq `[E/2]`; cos and sin `[positions, E/2]`, where `positions` follows from their length.
#[track_caller]
pub fn fill_tables(inv_freq: &[f64], factor: f64, cos: &mut [f32], sin: &mut [f32]) {
    let half = inv_freq.len();
    assert!(half > 0, "rope: inv_freq is empty");
    assert!(
        cos.len().is_multiple_of(half),
        "rope: cos has {} elements, not rows of {half}",
        cos.len()
    );
    check::len("sin", sin, cos.len());
    for (position, (cos, sin)) in cos.chunks_mut(half).zip(sin.chunks_mut(half)).enumerate() {
        for ((cos, sin), inv_freq) in cos.iter_mut().zip(sin).zip(inv_freq) {
            let (s, c) = (position as f64 * inv_freq).sin_cos();
            (*cos, *sin) = ((c * factor) as f32, (s * factor) as f32);
        }
    }
}

/// Rotates x in place.
///
/// # Panics
/// If a position is not below the rows of the tables, or E is odd.
#[track_caller]
pub fn forward<'on>(
    on: impl Into<On<'on>>,
    dims: &RopeDims,
    positions: &[u32], // [T]
    cos: &[f32],       // [positions, E/2]
    sin: &[f32],       // [positions, E/2]
    x: RowsMut<'_>,    // [T, heads * E]
) {
    check_all(dims, positions, cos, sin, &x);
    match on.into() {
        On::Cpu(cpu) => cpu::rotate(cpu, dims, positions, (cos, sin), 1.0, x),
        On::Device(unified) => unified.run(|call| {
            let (positions, x) = (call.input(positions)?, call.rows_mut(x)?);
            let (cos, sin) = (call.input(cos)?, call.input(sin)?);
            device::forward(call.device(), dims, positions, cos, sin, x)
        }),
    }
}

/// Turns the gradient of the rotated x into that of x, in place.
///
/// # Panics
/// As [`forward`].
#[track_caller]
pub fn backward<'on>(
    on: impl Into<On<'on>>,
    dims: &RopeDims,
    positions: &[u32], // [T]
    cos: &[f32],       // [positions, E/2]
    sin: &[f32],       // [positions, E/2]
    dx: RowsMut<'_>,   // [T, heads * E]
) {
    check_all(dims, positions, cos, sin, &dx);
    match on.into() {
        On::Cpu(cpu) => cpu::rotate(cpu, dims, positions, (cos, sin), -1.0, dx),
        On::Device(unified) => unified.run(|call| {
            let (positions, dx) = (call.input(positions)?, call.rows_mut(dx)?);
            let (cos, sin) = (call.input(cos)?, call.input(sin)?);
            device::backward(call.device(), dims, positions, cos, sin, dx)
        }),
    }
}

#[track_caller]
fn check_all(dims: &RopeDims, positions: &[u32], cos: &[f32], sin: &[f32], x: &RowsMut<'_>) {
    assert!(
        dims.head_dim > 0 && dims.head_dim.is_multiple_of(2),
        "rope: head dim {} is not even",
        dims.head_dim
    );
    let expected = (dims.tokens, dims.heads * dims.head_dim);
    assert!(
        (x.rows(), x.width()) == expected,
        "rope: x is [{}, {}], the dimensions say {expected:?}",
        x.rows(),
        x.width()
    );
    check::len("positions", positions, dims.tokens);
    check::len("sin", sin, cos.len());
    let rows = cos.len() / (dims.head_dim / 2);
    if let Some(t) = positions.iter().position(|&p| p as usize >= rows) {
        panic!(
            "rope: position {} of token {t} is beyond the table of {rows}",
            positions[t]
        );
    }
}

//! Starts the kernel of `cuda.cu`. [`fill_tables`](crate::ops::rope::fill_tables) makes the tables, on the host.

use crate::cuda::source::ROPE as MODULE;
use crate::cuda::{Arg, CudaError, Device, RowsMut, View, count};
use crate::ops::rope::RopeDims;

const THREADS: u32 = 256;

/// Rotates x in place. A position beyond the tables gives NaN.
///
/// # Panics
/// If E is odd.
#[track_caller]
pub fn forward(
    device: &Device,
    dims: &RopeDims,
    positions: View<'_, u32>, // [T]
    cos: View<'_, f32>,       // [positions, E/2]
    sin: View<'_, f32>,       // [positions, E/2]
    x: RowsMut<'_>,           // [T, heads * E]
) -> Result<(), CudaError> {
    rotate(device, dims, positions, (cos, sin), 1.0, x)
}

/// Turns the gradient of the rotated x into that of x, in place.
///
/// # Panics
/// As [`forward`].
#[track_caller]
pub fn backward(
    device: &Device,
    dims: &RopeDims,
    positions: View<'_, u32>, // [T]
    cos: View<'_, f32>,       // [positions, E/2]
    sin: View<'_, f32>,       // [positions, E/2]
    dx: RowsMut<'_>,          // [T, heads * E]
) -> Result<(), CudaError> {
    rotate(device, dims, positions, (cos, sin), -1.0, dx)
}

#[track_caller]
fn rotate(
    device: &Device,
    dims: &RopeDims,
    positions: View<'_, u32>,
    (cos, sin): (View<'_, f32>, View<'_, f32>),
    sign: f32,
    x: RowsMut<'_>,
) -> Result<(), CudaError> {
    let half = dims.head_dim / 2;
    assert!(
        half > 0 && dims.head_dim.is_multiple_of(2),
        "rope: head dim {} is not even",
        dims.head_dim
    );
    let expected = (dims.tokens, dims.heads * dims.head_dim);
    assert!(
        x.shape() == expected,
        "rope: x is {:?}, the dimensions say {expected:?}",
        x.shape()
    );
    positions.check("positions", dims.tokens);
    sin.check("sin", cos.len());
    let rows = count("rows of the tables", cos.len() / half);
    let [x, stride] = x.args();
    let [tokens, heads, head_dim] =
        [dims.tokens, dims.heads, dims.head_dim].map(|n| count("T, heads or E", n));
    let args = [
        positions.arg(),
        cos.arg(),
        sin.arg(),
        Arg::from(rows),
        Arg::from(sign),
        x,
        stride,
        Arg::from(tokens),
        Arg::from(heads),
        Arg::from(head_dim),
    ];
    let pairs = count("heads * E/2", dims.heads * half);
    let grid = [pairs.div_ceil(THREADS), tokens.min(65_535), 1];
    // SAFETY: x is [T, heads * E], the tables have `rows` rows of E/2, which the kernel compares positions with.
    unsafe { device.launch(&MODULE, "rope_rotate", grid, [THREADS, 1, 1], &args) }
}

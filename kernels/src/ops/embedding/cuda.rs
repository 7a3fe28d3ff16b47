//! Starts the kernels of `cuda.cu`.

use crate::cuda::source::EMBEDDING as MODULE;
use crate::cuda::{Arg, CudaError, Device, View, ViewMut, count};
use crate::ops::embedding::EmbeddingDims;

const BLOCK: [u32; 3] = [256, 1, 1];

/// `y[t]` = `table[ids[t]]`, 0 for ids of other shards, NaN for ids that are not below V.
#[track_caller]
pub fn forward(
    device: &Device,
    dims: &EmbeddingDims,
    table: View<'_, f32>, // [rows, D]
    ids: View<'_, u32>,   // [T]
    y: ViewMut<'_, f32>,  // [T, D]
) -> Result<(), CudaError> {
    table.check("table", dims.rows * dims.width);
    y.check("y", dims.tokens * dims.width);
    ids.check("ids", dims.tokens);
    let [vocab, first, rows, width] = numbers(dims);
    let args = [table.arg(), ids.arg(), y.arg(), vocab, first, rows, width];
    let grid = [count("T", dims.tokens), 1, 1];
    // SAFETY: shapes as checked above; the kernel compares ids with the rows at hand.
    unsafe { device.launch(&MODULE, "embedding_forward", grid, BLOCK, &args) }
}

/// `dtable[ids[t]]` += `dy[t]` in the order of t. Ids that are not of these rows add nothing.
#[track_caller]
pub fn backward(
    device: &Device,
    dims: &EmbeddingDims,
    dy: View<'_, f32>,        // [T, D]
    ids: View<'_, u32>,       // [T]
    dtable: ViewMut<'_, f32>, // [rows, D]
) -> Result<(), CudaError> {
    dtable.check("dtable", dims.rows * dims.width);
    dy.check("dy", dims.tokens * dims.width);
    ids.check("ids", dims.tokens);
    let [_, first, rows, width] = numbers(dims);
    let tokens = count("T", dims.tokens);
    let args = [
        dy.arg(),
        ids.arg(),
        dtable.arg(),
        tokens.into(),
        first,
        rows,
        width,
    ];
    // SAFETY: as above.
    unsafe { device.launch(&MODULE, "embedding_backward", [tokens, 1, 1], BLOCK, &args) }
}

fn numbers(dims: &EmbeddingDims) -> [Arg; 4] {
    [dims.vocab, dims.first_id, dims.rows, dims.width].map(|n| count("V or D", n).into())
}

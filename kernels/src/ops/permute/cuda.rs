//! Starts the kernels of `cuda.cu`.

use crate::cuda::source::PERMUTE as MODULE;
use crate::cuda::{Arg, CudaError, Device, View, ViewMut, count};
use crate::ops::permute::PermuteDims;

const BLOCK: [u32; 3] = [256, 1, 1];

/// The order of rows that [`sort`] made.
#[derive(Debug, Clone, Copy)]
pub struct Order<'a> {
    /// Slot of each row `[T k]`.
    pub slots: View<'a, u32>,
    /// Row of each slot `[T k]`.
    pub rows: View<'a, u32>,
}

/// Sorts the slots by expert: fills offsets (expert e has rows `offsets[e]`..`offsets[e + 1]`), slots and rows.
///
/// Experts must be below X: on a device, a slot of another gets no row.
#[track_caller]
pub fn sort(
    device: &Device,
    experts: View<'_, u32>,    // [T, k]
    offsets: ViewMut<'_, u32>, // [X + 1]
    slots: ViewMut<'_, u32>,   // [T k]
    rows: ViewMut<'_, u32>,    // [T k]
) -> Result<(), CudaError> {
    slots.check("slots", experts.len());
    rows.check("rows", experts.len());
    let slots_count = count("T k", experts.len()).into();
    let args = [
        experts.arg(),
        slots_count,
        offsets.arg(),
        slots.arg(),
        rows.arg(),
    ];
    let grid = [count("X", offsets.len().saturating_sub(1)), 1, 1];
    // SAFETY: a block an expert writes its offset, and rows below the number of slots.
    unsafe { device.launch(&MODULE, "permute_sort", grid, BLOCK, &args) }
}

/// y of every row from x of its token.
#[track_caller]
pub fn permute(
    device: &Device,
    dims: &PermuteDims,
    order: &Order<'_>,
    x: View<'_, f32>,    // [T, D]
    y: ViewMut<'_, f32>, // [T k, D]
) -> Result<(), CudaError> {
    check_order(dims, order);
    x.check("x", dims.tokens * dims.width);
    y.check("y", dims.rows() * dims.width);
    let [top_k, width] = numbers(dims);
    let args = [order.slots.arg(), x.arg(), y.arg(), top_k, width];
    let grid = [count("T k", dims.rows()), 1, 1];
    // SAFETY: shapes as checked above; the order is of `sort`.
    unsafe { device.launch(&MODULE, "permute_gather", grid, BLOCK, &args) }
}

/// dx of every token from dy of its rows, added to dx if `accumulate`.
#[track_caller]
pub fn permute_backward(
    device: &Device,
    dims: &PermuteDims,
    order: &Order<'_>,
    dy: View<'_, f32>, // [T k, D]
    accumulate: bool,
    dx: ViewMut<'_, f32>, // [T, D]
) -> Result<(), CudaError> {
    gather_sum(device, dims, order, dy, Arg::NULL, accumulate, dx)
}

/// The weighted sum of every token's rows, added to out if `accumulate` (the residual stream).
#[track_caller]
pub fn unpermute(
    device: &Device,
    dims: &PermuteDims,
    order: &Order<'_>,
    y: View<'_, f32>,       // [T k, D]
    weights: View<'_, f32>, // [T, k]
    accumulate: bool,
    out: ViewMut<'_, f32>, // [T, D]
) -> Result<(), CudaError> {
    weights.check("weights", dims.rows());
    gather_sum(device, dims, order, y, weights.arg(), accumulate, out)
}

#[track_caller]
fn gather_sum(
    device: &Device,
    dims: &PermuteDims,
    order: &Order<'_>,
    y: View<'_, f32>,
    weights: Arg,
    accumulate: bool,
    out: ViewMut<'_, f32>,
) -> Result<(), CudaError> {
    check_order(dims, order);
    y.check("y", dims.rows() * dims.width);
    out.check("out", dims.tokens * dims.width);
    let [top_k, width] = numbers(dims);
    let args = [
        order.rows.arg(),
        y.arg(),
        weights,
        accumulate.into(),
        out.arg(),
        top_k,
        width,
    ];
    let grid = [count("T", dims.tokens), 1, 1];
    // SAFETY: shapes as checked above; the order is of `sort`.
    unsafe { device.launch(&MODULE, "permute_gather_sum", grid, BLOCK, &args) }
}

/// Overwrites dy and d_weights.
#[track_caller]
#[allow(clippy::too_many_arguments)] // the operands of one fused op
pub fn unpermute_backward(
    device: &Device,
    dims: &PermuteDims,
    order: &Order<'_>,
    dout: View<'_, f32>,         // [T, D]
    y: View<'_, f32>,            // [T k, D]
    weights: View<'_, f32>,      // [T, k]
    dy: ViewMut<'_, f32>,        // [T k, D]
    d_weights: ViewMut<'_, f32>, // [T, k]
) -> Result<(), CudaError> {
    check_order(dims, order);
    dout.check("dout", dims.tokens * dims.width);
    y.check("y", dims.rows() * dims.width);
    dy.check("dy", dims.rows() * dims.width);
    weights.check("weights", dims.rows());
    d_weights.check("d_weights", dims.rows());
    let inputs = [order.slots.arg(), dout.arg(), y.arg(), weights.arg()];
    let args = [&inputs[..], &[dy.arg(), d_weights.arg()], &numbers(dims)].concat();
    let grid = [count("T k", dims.rows()), 1, 1];
    // SAFETY: shapes as checked above; the order is of `sort`.
    unsafe { device.launch(&MODULE, "permute_unpermute_backward", grid, BLOCK, &args) }
}

fn numbers(dims: &PermuteDims) -> [Arg; 2] {
    [count("k", dims.top_k).into(), count("D", dims.width).into()]
}

#[track_caller]
fn check_order(dims: &PermuteDims, order: &Order<'_>) {
    order.slots.check("slots", dims.rows());
    order.rows.check("rows", dims.rows());
}

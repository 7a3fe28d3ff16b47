//! Starts the kernels of `cuda.cu`.

use half::bf16;

use crate::cuda::source::ELEMENTWISE as MODULE;
use crate::cuda::{Arg, Buffer, CudaError, Device, MOST_BLOCKS, View, ViewMut, flat_blocks};

/// Elements of the scratch of [`sum_of_squares`].
pub const SUM_OF_SQUARES_SCRATCH: usize = MOST_BLOCKS;

/// `total[0]` = sum of x^2 in f64, the same in every run; not finite if an element is not.
///
/// scratch: [`SUM_OF_SQUARES_SCRATCH`] elements.
#[track_caller]
pub fn sum_of_squares(
    device: &Device,
    x: View<'_, f32>,
    scratch: &mut Buffer<f64>,
    total: ViewMut<'_, f64>, // [1]
) -> Result<(), CudaError> {
    total.check("total", 1);
    assert!(
        scratch.len() >= SUM_OF_SQUARES_SCRATCH,
        "scratch has {} elements, needs {SUM_OF_SQUARES_SCRATCH}",
        scratch.len()
    );
    let (grid, block) = flat_blocks(x.len());
    let partial = [x.arg(), scratch.view_mut().arg(), Arg::from(x.len())];
    let sum = [scratch.view().arg(), Arg::from(grid[0]), total.arg()];
    // SAFETY: a block writes one partial sum, of which there are at most MOST_BLOCKS; the last block reads as many.
    unsafe {
        device.launch(&MODULE, "sum_of_squares_partial", grid, block, &partial)?;
        device.launch(&MODULE, "sum_of_squares_total", [1; 3], block, &sum)
    }
}

/// y += x.
#[track_caller]
pub fn add_assign(device: &Device, y: ViewMut<'_, f32>, x: View<'_, f32>) -> Result<(), CudaError> {
    axpy(device, 1.0, x, y)
}

/// y += alpha x.
#[track_caller]
pub fn axpy(
    device: &Device,
    alpha: f32,
    x: View<'_, f32>,
    y: ViewMut<'_, f32>,
) -> Result<(), CudaError> {
    x.check("x", y.len());
    flat(
        device,
        "axpy",
        x.len(),
        &[Arg::from(alpha), x.arg(), y.arg()],
    )
}

/// out = x + y.
#[track_caller]
pub fn add(
    device: &Device,
    x: View<'_, f32>,
    y: View<'_, f32>,
    out: ViewMut<'_, f32>,
) -> Result<(), CudaError> {
    x.check("x", out.len());
    y.check("y", out.len());
    flat(device, "add", x.len(), &[x.arg(), y.arg(), out.arg()])
}

/// x *= alpha.
pub fn scale(device: &Device, alpha: f32, x: ViewMut<'_, f32>) -> Result<(), CudaError> {
    flat(device, "scale", x.len(), &[Arg::from(alpha), x.arg()])
}

/// Rounds to nearest, ties to even; NaN stays NaN.
#[track_caller]
pub fn f32_to_bf16(
    device: &Device,
    x: View<'_, f32>,
    y: ViewMut<'_, bf16>,
) -> Result<(), CudaError> {
    y.check("y", x.len());
    flat(device, "f32_to_bf16", x.len(), &[x.arg(), y.arg()])
}

/// Exact.
#[track_caller]
pub fn bf16_to_f32(
    device: &Device,
    x: View<'_, bf16>,
    y: ViewMut<'_, f32>,
) -> Result<(), CudaError> {
    y.check("y", x.len());
    flat(device, "bf16_to_f32", x.len(), &[x.arg(), y.arg()])
}

/// A kernel over `len` elements of each buffer, whose last parameter is their number.
fn flat(device: &Device, kernel: &'static str, len: usize, args: &[Arg]) -> Result<(), CudaError> {
    let args = [args, &[Arg::from(len)]].concat();
    let (grid, block) = flat_blocks(len);
    // SAFETY: all callers checked that every buffer has `len` elements.
    unsafe { device.launch(&MODULE, kernel, grid, block, &args) }
}

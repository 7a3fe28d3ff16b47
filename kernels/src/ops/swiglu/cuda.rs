//! Starts the kernels of `cuda.cu`.

use crate::cuda::source::SWIGLU as MODULE;
use crate::cuda::{Arg, CudaError, Device, Rows, RowsMut, View, ViewMut, count};

const THREADS: u32 = 256;

/// y = silu(gate) up.
#[track_caller]
pub fn forward(
    device: &Device,
    gate: Rows<'_>,      // [T, F]
    up: Rows<'_>,        // [T, F]
    y: ViewMut<'_, f32>, // [T, F]
) -> Result<(), CudaError> {
    let shape = gate.shape();
    check_rows("up", up.shape(), shape);
    y.check("y", shape.0 * shape.1);
    let inputs = [gate.args(), up.args()].concat();
    let args = [&inputs[..], &[y.arg()], &sizes(shape)].concat();
    // SAFETY: all have the shape of gate.
    unsafe {
        device.launch(
            &MODULE,
            "swiglu_forward",
            grid(shape),
            [THREADS, 1, 1],
            &args,
        )
    }
}

/// dgate and dup from dy and the inputs of the forward pass; both overwritten.
#[track_caller]
pub fn backward(
    device: &Device,
    dy: View<'_, f32>,  // [T, F]
    gate: Rows<'_>,     // [T, F]
    up: Rows<'_>,       // [T, F]
    dgate: RowsMut<'_>, // [T, F]
    dup: RowsMut<'_>,   // [T, F]
) -> Result<(), CudaError> {
    let shape = gate.shape();
    check_rows("up", up.shape(), shape);
    check_rows("dgate", dgate.shape(), shape);
    check_rows("dup", dup.shape(), shape);
    dy.check("dy", shape.0 * shape.1);
    let rows = [gate.args(), up.args(), dgate.args(), dup.args()].concat();
    let args = [&[dy.arg()], &rows[..], &sizes(shape)].concat();
    // SAFETY: all have the shape of gate.
    unsafe {
        device.launch(
            &MODULE,
            "swiglu_backward",
            grid(shape),
            [THREADS, 1, 1],
            &args,
        )
    }
}

fn grid((tokens, width): (usize, usize)) -> [u32; 3] {
    [
        count("F", width).div_ceil(THREADS),
        count("T", tokens).min(65_535),
        1,
    ]
}

fn sizes((tokens, width): (usize, usize)) -> [Arg; 2] {
    [count("T", tokens).into(), count("F", width).into()]
}

#[track_caller]
fn check_rows(name: &str, found: (usize, usize), expected: (usize, usize)) {
    assert!(
        found == expected,
        "swiglu: {name} is {found:?}, gate is {expected:?}"
    );
}

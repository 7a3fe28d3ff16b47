//! The products by the device's library, the bias by the kernels of `cuda.cu`.

use crate::cuda::ops::gemm::gemm;
use crate::cuda::source::LINEAR as MODULE;
use crate::cuda::{Arg, CudaError, Device, Rows, RowsMut, View, ViewMut, count};
use crate::ops::gemm::Gemm;
use crate::ops::linear::LinearDims;

/// y = x W^T + b.
#[track_caller]
pub fn forward(
    device: &Device,
    dims: &LinearDims,
    x: Rows<'_>,                 // [T, D]
    weight: Rows<'_>,            // [N, D]
    bias: Option<View<'_, f32>>, // [N]
    y: RowsMut<'_>,              // [T, N]
) -> Result<(), CudaError> {
    let LinearDims {
        tokens,
        inputs,
        outputs,
        ..
    } = *dims;
    let product = Gemm::nt(tokens, outputs, inputs).strides(dims.x_stride, inputs, dims.y_stride);
    if let Some(bias) = bias {
        bias.check("bias", outputs);
        assert!(
            y.shape() == (tokens, outputs),
            "linear: y is {:?}, not {:?}",
            y.shape(),
            (tokens, outputs)
        );
        let width = count("N", outputs);
        let [address, stride] = y.args();
        let args = [
            bias.arg(),
            address,
            stride,
            width.into(),
            count("T", tokens).into(),
        ];
        let grid = [width.div_ceil(256), count("T", tokens).min(65_535), 1];
        // SAFETY: bias is [N], y [T, N].
        unsafe { device.launch(&MODULE, "linear_fill_bias", grid, [256, 1, 1], &args)? };
    }
    gemm(device, &product.accumulate(bias.is_some()), x, weight, y)
}

/// dx = dy W, added to dx if `accumulate`.
#[track_caller]
pub fn backward_input(
    device: &Device,
    dims: &LinearDims,
    dy: Rows<'_>,     // [T, N]
    weight: Rows<'_>, // [N, D]
    accumulate: bool,
    dx: RowsMut<'_>, // [T, D]
) -> Result<(), CudaError> {
    let product = Gemm::nn(dims.tokens, dims.inputs, dims.outputs)
        .strides(dims.y_stride, dims.inputs, dims.x_stride)
        .accumulate(accumulate);
    gemm(device, &product, dy, weight, dx)
}

/// dW = dy^T x, added to dW if `accumulate`.
#[track_caller]
pub fn backward_weight(
    device: &Device,
    dims: &LinearDims,
    dy: Rows<'_>, // [T, N]
    x: Rows<'_>,  // [T, D]
    accumulate: bool,
    dweight: RowsMut<'_>, // [N, D]
) -> Result<(), CudaError> {
    let product = Gemm::tn(dims.outputs, dims.inputs, dims.tokens)
        .strides(dims.y_stride, dims.x_stride, dims.inputs)
        .accumulate(accumulate);
    gemm(device, &product, dy, x, dweight)
}

/// db = column sums of dy in f64, added to db if `accumulate`.
#[track_caller]
pub fn backward_bias(
    device: &Device,
    dims: &LinearDims,
    dy: Rows<'_>, // [T, N]
    accumulate: bool,
    dbias: ViewMut<'_, f32>, // [N]
) -> Result<(), CudaError> {
    dbias.check("dbias", dims.outputs);
    let expected = (dims.tokens, dims.outputs);
    assert!(
        dy.shape() == expected,
        "linear: dy is {:?}, not {expected:?}",
        dy.shape()
    );
    let [address, stride] = dy.args();
    let sizes = [
        count("T", dims.tokens).into(),
        count("N", dims.outputs).into(),
    ];
    let args = [
        &[address, stride, Arg::from(accumulate), dbias.arg()],
        &sizes[..],
    ]
    .concat();
    let grid = [count("N", dims.outputs).div_ceil(32), 1, 1];
    // SAFETY: dy is [T, N], dbias [N].
    unsafe { device.launch(&MODULE, "linear_backward_bias", grid, [32, 32, 1], &args) }
}

//! Starts the kernels of `cuda.cu`.

use crate::cuda::source::RMS_NORM as MODULE;
use crate::cuda::{Arg, CudaError, Device, Rows, RowsMut, View, ViewMut, count, row_threads};
use crate::ops::rms_norm::RmsNormDims;

/// y = norm(x) w; fills inv_rms.
#[track_caller]
pub fn forward(
    device: &Device,
    dims: &RmsNormDims,
    x: Rows<'_>,               // [T, groups * width]
    weight: View<'_, f32>,     // [width]
    y: RowsMut<'_>,            // [T, groups * width]
    inv_rms: ViewMut<'_, f32>, // [T * groups]
) -> Result<(), CudaError> {
    check_rows(dims, "x", x.shape());
    check_rows(dims, "y", y.shape());
    weight.check("weight", dims.width);
    inv_rms.check("inv_rms", dims.rows());
    let ([x, x_stride], [y, y_stride]) = (x.args(), y.args());
    let (groups, width) = (
        count("groups", dims.groups).into(),
        count("width", dims.width).into(),
    );
    let eps = Arg::from(dims.eps);
    let args = [
        x,
        x_stride,
        weight.arg(),
        y,
        y_stride,
        inv_rms.arg(),
        groups,
        width,
        eps,
    ];
    // SAFETY: x and y are [T, groups * width], the others as checked above.
    unsafe {
        device.launch(
            &MODULE,
            "rms_norm_forward",
            rows(dims),
            threads(dims),
            &args,
        )
    }
}

/// y = x inv_rms w with the inv_rms of an earlier call: the y of that call, bit for bit.
#[track_caller]
pub fn apply(
    device: &Device,
    dims: &RmsNormDims,
    x: Rows<'_>,            // [T, groups * width]
    weight: View<'_, f32>,  // [width]
    inv_rms: View<'_, f32>, // [T * groups]
    y: RowsMut<'_>,         // [T, groups * width]
) -> Result<(), CudaError> {
    check_rows(dims, "x", x.shape());
    check_rows(dims, "y", y.shape());
    weight.check("weight", dims.width);
    inv_rms.check("inv_rms", dims.rows());
    let ([x, x_stride], [y, y_stride]) = (x.args(), y.args());
    let (groups, width) = (
        count("groups", dims.groups).into(),
        count("width", dims.width).into(),
    );
    let args = [
        x,
        x_stride,
        weight.arg(),
        inv_rms.arg(),
        y,
        y_stride,
        groups,
        width,
    ];
    // SAFETY: x and y are [T, groups * width], the others as checked above.
    unsafe { device.launch(&MODULE, "rms_norm_apply", rows(dims), threads(dims), &args) }
}

/// h = x + residual; y = norm(h) w; fills inv_rms. All contiguous, one group.
#[track_caller]
#[allow(clippy::too_many_arguments)] // the operands of one fused op
pub fn forward_residual(
    device: &Device,
    dims: &RmsNormDims,
    x: View<'_, f32>,          // [T, D]
    residual: View<'_, f32>,   // [T, D]
    weight: View<'_, f32>,     // [D]
    h: ViewMut<'_, f32>,       // [T, D]
    y: ViewMut<'_, f32>,       // [T, D]
    inv_rms: ViewMut<'_, f32>, // [T]
) -> Result<(), CudaError> {
    assert!(dims.groups == 1, "rms_norm with a residual has one group");
    let len = dims.tokens * dims.width;
    x.check("x", len);
    residual.check("residual", len);
    h.check("h", len);
    y.check("y", len);
    weight.check("weight", dims.width);
    inv_rms.check("inv_rms", dims.tokens);
    let width = count("width", dims.width).into();
    let outputs = [h.arg(), y.arg(), inv_rms.arg()];
    let inputs = [x.arg(), residual.arg(), weight.arg()];
    let args = [&inputs[..], &outputs, &[width, Arg::from(dims.eps)]].concat();
    // SAFETY: all are [T, D], [D] or [T], as checked above.
    unsafe {
        device.launch(
            &MODULE,
            "rms_norm_forward_residual",
            rows(dims),
            threads(dims),
            &args,
        )
    }
}

/// dx and dw from dy, the x (or h) and inv_rms of the forward pass; each overwritten or added to.
#[track_caller]
#[allow(clippy::too_many_arguments)] // the operands of one fused op
pub fn backward(
    device: &Device,
    dims: &RmsNormDims,
    dy: Rows<'_>,           // [T, groups * width]
    x: Rows<'_>,            // [T, groups * width]
    weight: View<'_, f32>,  // [width]
    inv_rms: View<'_, f32>, // [T * groups]
    accumulate_dx: bool,
    dx: RowsMut<'_>, // [T, groups * width]
    accumulate_dw: bool,
    dweight: ViewMut<'_, f32>, // [width]
) -> Result<(), CudaError> {
    check_rows(dims, "dy", dy.shape());
    check_rows(dims, "x", x.shape());
    check_rows(dims, "dx", dx.shape());
    weight.check("weight", dims.width);
    dweight.check("dweight", dims.width);
    inv_rms.check("inv_rms", dims.rows());
    let (groups, width) = (
        count("groups", dims.groups).into(),
        count("width", dims.width).into(),
    );
    let inputs = [dy.args(), x.args()].concat();
    let of_weight = [
        &inputs[..],
        &[inv_rms.arg(), Arg::from(accumulate_dw), dweight.arg()],
        &[count("rows", dims.rows()).into(), groups, width],
    ];
    let of_input = [
        &inputs[..],
        &[weight.arg(), inv_rms.arg(), Arg::from(accumulate_dx)],
        &dx.args(),
        &[groups, width],
    ];
    let columns = [count("width", dims.width.div_ceil(32)), 1, 1];
    let (of_weight, of_input) = (of_weight.concat(), of_input.concat());
    // SAFETY: dy, x and dx are [T, groups * width], the others as checked above.
    unsafe {
        device.launch(
            &MODULE,
            "rms_norm_backward_weight",
            columns,
            [32, 32, 1],
            &of_weight,
        )?;
        device.launch(
            &MODULE,
            "rms_norm_backward_input",
            rows(dims),
            threads(dims),
            &of_input,
        )
    }
}

fn rows(dims: &RmsNormDims) -> [u32; 3] {
    [count("rows", dims.rows()), 1, 1]
}

fn threads(dims: &RmsNormDims) -> [u32; 3] {
    row_threads(dims.width, 512)
}

#[track_caller]
fn check_rows(dims: &RmsNormDims, name: &str, found: (usize, usize)) {
    let expected = (dims.tokens, dims.groups * dims.width);
    assert!(
        found == expected,
        "rms_norm: {name} is {found:?}, the dimensions say {expected:?}"
    );
}

//! Starts the kernels of `cuda.cu`.

use crate::cuda::source::CROSS_ENTROPY as MODULE;
use crate::cuda::{Arg, CudaError, Device, View, ViewMut, count, row_threads};
use crate::ops::cross_entropy::{CrossEntropyDims, PARTIALS};

/// Fills log_prob, lse, and entropy if given, from logits over the whole vocabulary. A target that is not below
/// V has log_prob negative infinity.
///
/// # Panics
/// If the temperature is not positive and finite, or columns are missing.
#[track_caller]
pub fn forward(
    device: &Device,
    dims: &CrossEntropyDims,
    logits: View<'_, f32>,             // [N, V]
    targets: View<'_, u32>,            // [N]
    log_prob: ViewMut<'_, f32>,        // [N]
    entropy: Option<ViewMut<'_, f32>>, // [N]
    lse: ViewMut<'_, f64>,             // [N]
) -> Result<(), CudaError> {
    check_inputs(dims, logits.len(), &targets);
    assert!(
        dims.columns == dims.vocab && dims.first_id == 0,
        "cross_entropy: {dims:?} is a shard: use forward_partial and combine"
    );
    let outputs = outputs(dims.rows, &log_prob, &entropy, &lse);
    let inputs = [logits.arg(), targets.arg(), inverse(dims)];
    let args = [&inputs[..], &outputs, &[columns(dims)]].concat();
    // SAFETY: shapes as checked above; the kernel compares targets with the columns at hand.
    unsafe {
        device.launch(
            &MODULE,
            "cross_entropy_forward",
            rows(dims),
            threads(dims),
            &args,
        )
    }
}

/// Fills the partial results of this shard's columns, as on the CPU.
///
/// # Panics
/// If the temperature is not positive and finite.
#[track_caller]
pub fn forward_partial(
    device: &Device,
    dims: &CrossEntropyDims,
    logits: View<'_, f32>,  // [N, columns]
    targets: View<'_, u32>, // [N]
    entropy: bool,
    partials: ViewMut<'_, f64>, // [N, 4]
) -> Result<(), CudaError> {
    check_inputs(dims, logits.len(), &targets);
    partials.check("partials", dims.rows * PARTIALS);
    let inputs = [logits.arg(), targets.arg(), inverse(dims), entropy.into()];
    let args = [
        &inputs[..],
        &[partials.arg(), first_id(dims), columns(dims)],
    ]
    .concat();
    let kernel = "cross_entropy_forward_partial";
    // SAFETY: as above.
    unsafe { device.launch(&MODULE, kernel, rows(dims), threads(dims), &args) }
}

/// Fills log_prob, lse, and entropy if given, from the partial results of all R shards.
#[track_caller]
pub fn combine(
    device: &Device,
    rows: usize,
    partials: View<'_, f64>,           // [R, N, 4]
    log_prob: ViewMut<'_, f32>,        // [N]
    entropy: Option<ViewMut<'_, f32>>, // [N]
    lse: ViewMut<'_, f64>,             // [N]
) -> Result<(), CudaError> {
    let outputs = outputs(rows, &log_prob, &entropy, &lse);
    let shard = rows * PARTIALS;
    assert!(
        partials.len().is_multiple_of(shard.max(1)),
        "partials has {} elements, which are not whole shards of {rows} rows",
        partials.len()
    );
    let shards = count("R", partials.len() / shard.max(1)).into();
    let args = [
        &[partials.arg(), shards, count("N", rows).into()],
        &outputs[..],
    ]
    .concat();
    let grid = [count("N", rows).div_ceil(256), 1, 1];
    // SAFETY: shapes as checked above.
    unsafe { device.launch(&MODULE, "cross_entropy_combine", grid, [256, 1, 1], &args) }
}

/// What the backward pass knows of every row.
#[derive(Debug, Clone, Copy)]
pub struct Derivatives<'a> {
    /// Saved log-sum-exp `[N]`.
    pub lse: View<'a, f64>,
    /// Derivative of the loss by log_prob `[N]`.
    pub d_log_prob: View<'a, f32>,
    /// Saved entropy `[N]` and the derivative of the loss by it `[N]`, if the loss uses it.
    pub entropy: Option<(View<'a, f32>, View<'a, f32>)>,
}

/// Overwrites dlogits with the derivative of the loss by the logits, whole or a shard.
///
/// A row whose derivatives are both zero gets zeros, whatever its logits hold.
///
/// # Panics
/// If the temperature is not positive and finite.
#[track_caller]
pub fn backward(
    device: &Device,
    dims: &CrossEntropyDims,
    logits: View<'_, f32>,  // [N, columns]
    targets: View<'_, u32>, // [N]
    derivatives: &Derivatives<'_>,
    dlogits: ViewMut<'_, f32>, // [N, columns]
) -> Result<(), CudaError> {
    dlogits.check("dlogits", logits.len());
    check_inputs(dims, logits.len(), &targets);
    gradient(
        device,
        dims,
        logits.arg(),
        targets,
        derivatives,
        dlogits.arg(),
    )
}

/// As [`backward`], turning the logits themselves into dlogits.
#[track_caller]
pub fn backward_in_place(
    device: &Device,
    dims: &CrossEntropyDims,
    logits: ViewMut<'_, f32>, // [N, columns]
    targets: View<'_, u32>,   // [N]
    derivatives: &Derivatives<'_>,
) -> Result<(), CudaError> {
    check_inputs(dims, logits.len(), &targets);
    gradient(
        device,
        dims,
        logits.arg(),
        targets,
        derivatives,
        logits.arg(),
    )
}

#[track_caller]
fn gradient(
    device: &Device,
    dims: &CrossEntropyDims,
    logits: Arg,
    targets: View<'_, u32>,
    derivatives: &Derivatives<'_>,
    dlogits: Arg,
) -> Result<(), CudaError> {
    derivatives.lse.check("lse", dims.rows);
    derivatives.d_log_prob.check("d_log_prob", dims.rows);
    let (entropy, d_entropy) =
        derivatives
            .entropy
            .map_or((Arg::NULL, Arg::NULL), |(entropy, d)| {
                entropy.check("entropy", dims.rows);
                d.check("d_entropy", dims.rows);
                (entropy.arg(), d.arg())
            });
    let args = [
        logits,
        targets.arg(),
        inverse(dims),
        derivatives.lse.arg(),
        derivatives.d_log_prob.arg(),
        entropy,
        d_entropy,
        dlogits,
        first_id(dims),
        columns(dims),
    ];
    // SAFETY: shapes as checked above; in place, a thread reads a logit before it overwrites it, and no other does.
    unsafe {
        device.launch(
            &MODULE,
            "cross_entropy_backward",
            rows(dims),
            threads(dims),
            &args,
        )
    }
}

#[track_caller]
fn outputs(
    rows: usize,
    log_prob: &ViewMut<'_, f32>,
    entropy: &Option<ViewMut<'_, f32>>,
    lse: &ViewMut<'_, f64>,
) -> [Arg; 3] {
    log_prob.check("log_prob", rows);
    lse.check("lse", rows);
    let entropy = entropy.as_ref().map_or(Arg::NULL, |entropy| {
        entropy.check("entropy", rows);
        entropy.arg()
    });
    [log_prob.arg(), entropy, lse.arg()]
}

#[track_caller]
fn check_inputs(dims: &CrossEntropyDims, logits: usize, targets: &View<'_, u32>) {
    assert!(
        dims.temperature > 0.0 && dims.temperature.is_finite(),
        "cross_entropy: temperature {} is not positive and finite",
        dims.temperature
    );
    let expected = dims.rows * dims.columns;
    assert!(
        logits == expected,
        "logits has {logits} elements, its dimensions say {expected}"
    );
    targets.check("targets", dims.rows);
}

fn inverse(dims: &CrossEntropyDims) -> Arg {
    Arg::from(1.0 / dims.temperature)
}

fn rows(dims: &CrossEntropyDims) -> [u32; 3] {
    [count("N", dims.rows), 1, 1]
}

fn threads(dims: &CrossEntropyDims) -> [u32; 3] {
    row_threads(dims.columns, 1024)
}

fn columns(dims: &CrossEntropyDims) -> Arg {
    count("columns", dims.columns).into()
}

fn first_id(dims: &CrossEntropyDims) -> Arg {
    count("first_id", dims.first_id).into()
}

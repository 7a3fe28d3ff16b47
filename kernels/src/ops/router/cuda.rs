//! Starts the kernels of `cuda.cu`. [`update_bias`](crate::ops::router::update_bias) is the host's.

use std::ops::Range;

use crate::cuda::source::ROUTER as MODULE;
use crate::cuda::{Arg, CudaError, Device, Element, View, ViewMut, count};
use crate::ops::router::RouterDims;

/// Experts at most: the kernels keep a bit for each of a lane's.
pub const MOST_EXPERTS: usize = 1024;
const THREADS: u32 = 128;
const TOKENS_A_BLOCK: u32 = THREADS / 32;

/// f32 or f64: the type of the logits, and of the arithmetic on them.
pub trait Float: Element {
    /// Kernels of forward, backward and loads.
    #[doc(hidden)]
    const KERNELS: [&'static str; 3];
}

impl Float for f32 {
    const KERNELS: [&'static str; 3] = [
        "router_forward_f32",
        "router_backward_f32",
        "router_expert_loads_f32",
    ];
}

impl Float for f64 {
    const KERNELS: [&'static str; 3] = [
        "router_forward_f64",
        "router_backward_f64",
        "router_expert_loads_f64",
    ];
}

/// What [`forward`] fills.
#[derive(Debug)]
pub struct Routing<'a, F> {
    /// p `[T, X]`.
    pub probs: ViewMut<'a, F>,
    /// `[T]`.
    pub lse: ViewMut<'a, F>,
    /// Chosen experts `[T, k]`, the best first.
    pub experts: ViewMut<'a, u32>,
    /// Their weights `[T, k]`.
    pub weights: ViewMut<'a, f32>,
}

/// Chooses experts and weighs them.
///
/// # Panics
/// If k is 0 or above X, or X above 1,024.
#[track_caller]
pub fn forward<F: Float>(
    device: &Device,
    dims: &RouterDims,
    logits: View<'_, F>,         // [T, X]
    bias: Option<View<'_, f32>>, // [X]
    routing: Routing<'_, F>,
) -> Result<(), CudaError> {
    let (all, chosen) = lens(dims);
    logits.check("logits", all);
    routing.probs.check("probs", all);
    routing.lse.check("lse", dims.tokens);
    routing.experts.check("experts", chosen);
    routing.weights.check("weights", chosen);
    let bias = bias.map_or(Arg::NULL, |bias| {
        bias.check("bias", dims.experts);
        bias.arg()
    });
    let Routing {
        probs,
        lse,
        experts,
        weights,
    } = routing;
    let buffers = [
        logits.arg(),
        bias,
        probs.arg(),
        lse.arg(),
        experts.arg(),
        weights.arg(),
    ];
    let args = [&buffers[..], &numbers(dims)].concat();
    // SAFETY: shapes as checked above.
    unsafe {
        device.launch(
            &MODULE,
            F::KERNELS[0],
            grid(dims.tokens),
            [THREADS, 1, 1],
            &args,
        )
    }
}

/// What [`forward`] left, and the derivatives of the loss that arrive.
#[derive(Debug, Clone, Copy)]
pub struct Derivatives<'a, F> {
    /// `[T, X]`.
    pub probs: View<'a, F>,
    /// `[T, k]`.
    pub experts: View<'a, u32>,
    /// `[T, k]`.
    pub weights: View<'a, f32>,
    /// By the weights `[T, k]`.
    pub d_weights: View<'a, f32>,
    /// By p `[T, X]`, if a load-balancing loss is used.
    pub d_probs: Option<View<'a, F>>,
    /// By lse `[T]`, if a z-loss is used.
    pub d_lse: Option<View<'a, F>>,
}

/// Overwrites dlogits with the derivative of the loss by the logits.
///
/// # Panics
/// As [`forward`].
#[track_caller]
pub fn backward<F: Float>(
    device: &Device,
    dims: &RouterDims,
    derivatives: &Derivatives<'_, F>,
    dlogits: ViewMut<'_, F>, // [T, X]
) -> Result<(), CudaError> {
    let (all, chosen) = lens(dims);
    let Derivatives {
        probs,
        experts,
        weights,
        d_weights,
        d_probs,
        d_lse,
    } = derivatives;
    probs.check("probs", all);
    experts.check("experts", chosen);
    weights.check("weights", chosen);
    d_weights.check("d_weights", chosen);
    dlogits.check("dlogits", all);
    let optional = |view: &Option<View<'_, F>>, name, len| {
        view.map_or(Arg::NULL, |view| {
            view.check(name, len);
            view.arg()
        })
    };
    let buffers = [
        probs.arg(),
        experts.arg(),
        weights.arg(),
        d_weights.arg(),
        optional(d_probs, "d_probs", all),
        optional(d_lse, "d_lse", dims.tokens),
        dlogits.arg(),
    ];
    let args = [&buffers[..], &numbers(dims)].concat();
    // SAFETY: shapes as checked above; experts are compared with, never indexed by.
    unsafe {
        device.launch(
            &MODULE,
            F::KERNELS[1],
            grid(dims.tokens),
            [THREADS, 1, 1],
            &args,
        )
    }
}

/// Adds, for a range of the tokens, how many were sent to each expert and what p they gave it.
#[track_caller]
pub fn expert_loads<F: Float>(
    device: &Device,
    dims: &RouterDims,
    tokens: Range<usize>,
    experts: View<'_, u32>,      // [T, k]
    probs: View<'_, F>,          // [T, X]
    counts: ViewMut<'_, u32>,    // [X]
    prob_sums: ViewMut<'_, f64>, // [X]
) -> Result<(), CudaError> {
    let (all, chosen) = lens(dims);
    experts.check("experts", chosen);
    probs.check("probs", all);
    counts.check("counts", dims.experts);
    prob_sums.check("prob_sums", dims.experts);
    assert!(
        tokens.end <= dims.tokens,
        "router: tokens {tokens:?} of {}",
        dims.tokens
    );
    let buffers = [experts.arg(), probs.arg(), counts.arg(), prob_sums.arg()];
    let range = [
        count("T", tokens.start).into(),
        count("T", tokens.end).into(),
    ];
    let args = [&buffers[..], &range, &numbers(dims)[1..3]].concat();
    let grid = [count("X", dims.experts), 1, 1];
    // SAFETY: shapes as checked above.
    unsafe { device.launch(&MODULE, F::KERNELS[2], grid, [THREADS, 1, 1], &args) }
}

/// logits = x W^T, with products and sums in f64.
#[track_caller]
pub fn project_f64(
    device: &Device,
    dims: &RouterDims,
    x: View<'_, f32>,         // [T, D]
    weight: View<'_, f32>,    // [X, D]
    logits: ViewMut<'_, f64>, // [T, X]
) -> Result<(), CudaError> {
    let width = weight.len() / dims.experts;
    weight.check("weight", dims.experts * width);
    x.check("x", dims.tokens * width);
    logits.check("logits", dims.tokens * dims.experts);
    let sizes = [
        count("X", dims.experts).into(),
        count("D", width).into(),
        Arg::from(logits.len()),
    ];
    let args = [&[x.arg(), weight.arg(), logits.arg()], &sizes[..]].concat();
    // SAFETY: shapes as checked above.
    unsafe {
        device.launch(
            &MODULE,
            "router_project_f64",
            grid(logits.len()),
            [THREADS, 1, 1],
            &args,
        )
    }
}

/// Adds to dx, and to dweight if given, what flows back through [`project_f64`].
#[track_caller]
pub fn project_f64_backward(
    device: &Device,
    dims: &RouterDims,
    dlogits: View<'_, f64>,            // [T, X]
    x: View<'_, f32>,                  // [T, D]
    weight: View<'_, f32>,             // [X, D]
    dx: ViewMut<'_, f32>,              // [T, D]
    dweight: Option<ViewMut<'_, f32>>, // [X, D]
) -> Result<(), CudaError> {
    let (tokens, experts) = (dims.tokens, dims.experts);
    let width = weight.len() / experts;
    weight.check("weight", experts * width);
    dlogits.check("dlogits", tokens * experts);
    x.check("x", tokens * width);
    dx.check("dx", tokens * width);
    let add = |strides: (usize, usize), rows: View<'_, f32>, num_rows, out: ViewMut<'_, f32>, r| {
        let strides = [Arg::from(strides.0), Arg::from(strides.1)];
        let num_out = count("rows", r);
        let sizes = [
            count("rows", num_rows).into(),
            out.arg(),
            count("D", width).into(),
            num_out.into(),
        ];
        let args = [&[dlogits.arg()], &strides[..], &[rows.arg()], &sizes].concat();
        let grid = [count("D", width).div_ceil(256), num_out.min(65_535), 1];
        let kernel = "router_project_f64_backward";
        // SAFETY: shapes as checked; out has r rows of D, and dlogits is walked by its strides.
        unsafe { device.launch(&MODULE, kernel, grid, [256, 1, 1], &args) }
    };
    if let Some(dweight) = dweight {
        dweight.check("dweight", experts * width);
        add((1, experts), x, tokens, dweight, experts)?;
    }
    add((experts, 1), weight, experts, dx, tokens)
}

fn grid(tokens: usize) -> [u32; 3] {
    [count("T", tokens).div_ceil(TOKENS_A_BLOCK), 1, 1]
}

/// T, X, k and whether to renormalise.
fn numbers(dims: &RouterDims) -> [Arg; 4] {
    [
        count("T", dims.tokens).into(),
        count("X", dims.experts).into(),
        count("k", dims.top_k).into(),
        dims.renormalise.into(),
    ]
}

/// Elements of `[T, X]` and of `[T, k]`.
#[track_caller]
fn lens(dims: &RouterDims) -> (usize, usize) {
    assert!(
        (1..=dims.experts).contains(&dims.top_k) && dims.experts <= MOST_EXPERTS,
        "router: {} of {} experts a token (at most {MOST_EXPERTS} on a device)",
        dims.top_k,
        dims.experts
    );
    (dims.tokens * dims.experts, dims.tokens * dims.top_k)
}

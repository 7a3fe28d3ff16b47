//! Products with weights, rounded once in a short micro-batch.

use tch::{Device, Kind, Tensor};

use crate::{error::Torch, shim::exact_linear};

/// In micro-batches of up to this many tokens dot products of f32 are summed in f64, in host memory. Every gradient is a derivative at the point
/// that the forward pass computed: what its sums lose is in all of them, and few tokens average little of it out. What the
/// backward pass loses is a quarter of that, so it stays in f32. A product takes 1.3 to 1.6 times as long, both passes
/// together.
const EXACT_TOKENS: i64 = 64;

/// `x weight^T + bias`: x `[n, in]`, weight `[out, in]`, bias `[out]`, in a micro-batch of `num_tokens` tokens. The rows may
/// be fewer (an expert's) and are computed as those of their micro-batch are.
pub(super) fn linear(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    num_tokens: i64,
) -> Torch<Tensor> {
    let exact = weight.f_kind()? == Kind::Float && weight.device() == Device::Cpu;
    if num_tokens > EXACT_TOKENS || !exact {
        return x.f_linear(weight, bias);
    }
    let y = exact_linear(x, weight)?;
    match bias {
        Some(bias) => y.f_add(bias),
        None => Ok(y),
    }
}

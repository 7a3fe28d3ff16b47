//! Causal attention over packed sequences, one call a run of equal lengths.

use tch::{Kind, Tensor};

use super::packed::{Run, Runs};
use crate::error::Torch;

/// Turns pairs (i, i + E / 2) of every head by its token's angle, in f32. `[T, heads, E]`.
pub(super) fn rotate(x: &Tensor, (cos, sin): &(Tensor, Tensor)) -> Torch<Tensor> {
    let halves = x.f_chunk(2, -1)?;
    let (a, b) = (&halves[0], &halves[1]);
    let first = a.f_mul(cos)?.f_sub(&b.f_mul(sin)?)?;
    let second = b.f_mul(cos)?.f_add(&a.f_mul(sin)?)?;
    Tensor::f_cat(&[first, second], -1)?.f_to_kind(x.f_kind()?)
}

/// `softmax(q k^T / sqrt(E)) v` within each sequence. q `[T, H, E]`, k and v `[T, K, E]`; returns `[T, H x E]`.
pub(super) fn attend(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    Runs { runs, masks }: &Runs,
    window: Option<usize>,
) -> Torch<Tensor> {
    let mut outputs = runs
        .iter()
        .map(|run| {
            let mask = window.and_then(|w| masks.get(&(run.length, w as i64)));
            attend_run(q, k, v, *run, mask)
        })
        .collect::<Torch<Vec<_>>>()?;
    match outputs.len() {
        1 => Ok(outputs.remove(0)),
        _ => Tensor::f_cat(&outputs, 0),
    }
}

fn attend_run(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    run: Run,
    mask: Option<&Tensor>,
) -> Torch<Tensor> {
    let (num_heads, head_dim) = (q.size()[1], q.size()[2]);
    let num_kv_heads = k.size()[1];
    let shared = num_heads / num_kv_heads;
    let rows = run.length * run.count;
    let cut = |x: &Tensor, heads: i64| {
        x.f_narrow(0, run.start, rows)?
            .f_view([run.count, run.length, heads, head_dim])
    };
    let spread = |x: &Tensor| -> Torch<Tensor> {
        let x = cut(x, num_kv_heads)?;
        if shared == 1 {
            return x.f_transpose(1, 2);
        }
        x.f_unsqueeze(3)?
            .f_expand(
                [run.count, run.length, num_kv_heads, shared, head_dim],
                false,
            )?
            .f_reshape([run.count, run.length, num_heads, head_dim])?
            .f_transpose(1, 2)
    };
    let (q, k, v) = (
        cut(q, num_heads)?.f_transpose(1, 2)?,
        spread(k)?,
        spread(v)?,
    ); // [n, H, L, E]
    let mixed = match run.length <= EXACT_LENGTH {
        true => attend_exactly(&q, &k, &v, mask)?,
        false => {
            let causal = mask.is_none();
            let mask = mask.map(|mask| mask.f_to_kind(q.kind())).transpose()?;
            Tensor::f_scaled_dot_product_attention(&q, &k, &v, mask, 0.0, causal, None, false)?
        }
    };
    mixed
        .f_transpose(1, 2)?
        .f_reshape([rows, num_heads * head_dim])
}

/// Sequences up to this length are attended to in f64: beside the projections it costs nothing there. The gradients of
/// what shifts all keys alike (their bias and norm) are small differences of large terms, and f32 leaves them few digits.
const EXACT_LENGTH: i64 = 64;

fn attend_exactly(q: &Tensor, k: &Tensor, v: &Tensor, mask: Option<&Tensor>) -> Torch<Tensor> {
    let double = |x: &Tensor| x.f_to_kind(Kind::Double);
    let (length, head_dim) = (q.size()[2], q.size()[3]);
    let scores = double(q)?
        .f_matmul(&double(k)?.f_transpose(2, 3)?)?
        .f_mul_scalar(1.0 / (head_dim as f64).sqrt())?; // [n, H, L, L]
    let scores = match mask {
        Some(mask) => scores.f_add(mask)?,
        None => {
            let hidden = Tensor::f_ones([length, length], (Kind::Bool, q.device()))?.f_triu(1)?;
            scores.f_masked_fill(&hidden, f64::NEG_INFINITY)?
        }
    };
    scores
        .f_softmax(-1, None::<Kind>)?
        .f_matmul(&double(v)?)?
        .f_to_kind(q.f_kind()?)
}

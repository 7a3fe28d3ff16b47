//! Reductions in rank order: every member that makes one gets the same bits, over whatever transport.

use half::{bf16, f16};

use super::super::ReduceOp;
use crate::{Error, ErrorKind, Result, ViewMut};

/// Elements reduced at a time where the output is one of the parts: these fit the first cache.
const BLOCK: usize = 2048;

/// Reduces every rank's part, in rank order, into the output. A part is the bytes of as many elements as the output has,
/// of its dtype and aligned for it.
///
/// # Errors
/// `Unsupported` for an output that is not host memory.
pub fn reduce_in_rank_order(output: &mut ViewMut<'_>, parts: &[&[u8]], op: ReduceOp) -> Result<()> {
    match output {
        ViewMut::F64(out) => float(out, &cast(parts), op),
        ViewMut::F32(out) => float(out, &cast(parts), op),
        ViewMut::Bf16(out) => half(out, &cast(parts), op, bf16::to_f32, bf16::from_f32),
        ViewMut::F16(out) => half(out, &cast(parts), op, f16::to_f32, f16::from_f32),
        ViewMut::I64(out) => integer(out, &cast(parts), op, i64::wrapping_add),
        ViewMut::I32(out) => integer(out, &cast(parts), op, i32::wrapping_add),
        ViewMut::U8(out) => integer(out, &cast(parts), op, u8::wrapping_add),
        ViewMut::Device(_) => return Err(not_on_the_host()),
    }
    Ok(())
}

/// The same where the output holds this rank's part, `others` being the parts of all others in rank order.
///
/// # Errors
/// As [`reduce_in_rank_order`].
pub fn reduce_in_place(
    output: &mut ViewMut<'_>,
    rank: usize,
    others: &[&[u8]],
    op: ReduceOp,
) -> Result<()> {
    let size = output.dtype().size();
    let len = output.len();
    // Aligned for every dtype.
    let mut own = vec![0u64; (BLOCK.min(len) * size).div_ceil(8)];
    for start in (0..len).step_by(BLOCK) {
        let range = start..len.min(start + BLOCK);
        let bytes = range.start * size..range.end * size;
        let own: &mut [u8] = &mut bytemuck::cast_slice_mut(&mut own)[..bytes.len()];
        let Some(all) = output.host_bytes_mut() else {
            return Err(not_on_the_host());
        };
        own.copy_from_slice(&all[bytes.clone()]);
        let mut parts: Vec<&[u8]> = others.iter().map(|part| &part[bytes.clone()]).collect();
        parts.insert(rank, own);
        reduce_in_rank_order(&mut output.slice_mut(range), &parts, op)?;
    }
    Ok(())
}

fn not_on_the_host() -> Error {
    let message = "reductions between ranks are of host memory";
    Error::new(ErrorKind::Unsupported, "reduce", message)
}

fn cast<'a, T: bytemuck::AnyBitPattern>(parts: &[&'a [u8]]) -> Vec<&'a [T]> {
    parts
        .iter()
        .map(|part| bytemuck::cast_slice(part))
        .collect()
}

fn float<T>(out: &mut [T], parts: &[&[T]], op: ReduceOp)
where
    T: Copy + std::ops::AddAssign + PartialOrd,
{
    for (rank, values) in parts.iter().enumerate() {
        if rank == 0 {
            out.copy_from_slice(values);
            continue;
        }
        let pairs = out.iter_mut().zip(*values);
        match op {
            ReduceOp::Sum => pairs.for_each(|(o, &v)| *o += v),
            ReduceOp::Max => pairs.for_each(|(o, &v)| {
                let better = v > *o;
                keep(o, v, better);
            }),
            ReduceOp::Min => pairs.for_each(|(o, &v)| {
                let better = v < *o;
                keep(o, v, better);
            }),
        }
    }
}

/// Replaces `kept` by `value` if it is better or not a number.
#[allow(
    clippy::eq_op,
    reason = "only a NaN differs from itself, for any float type"
)]
fn keep<T: PartialOrd>(kept: &mut T, value: T, better: bool) {
    if better || value != value {
        *kept = value;
    }
}

fn half<T: Copy>(
    out: &mut [T],
    parts: &[&[T]],
    op: ReduceOp,
    widen: impl Fn(T) -> f32,
    round: impl Fn(f32) -> T,
) {
    for (i, o) in out.iter_mut().enumerate() {
        let mut values = parts.iter().map(|part| widen(part[i]));
        let mut kept = values.next().unwrap_or(0.0);
        for v in values {
            match op {
                ReduceOp::Sum => kept += v,
                ReduceOp::Max => {
                    let better = v > kept;
                    keep(&mut kept, v, better);
                }
                ReduceOp::Min => {
                    let better = v < kept;
                    keep(&mut kept, v, better);
                }
            }
        }
        *o = round(kept);
    }
}

fn integer<T: Copy + Ord>(out: &mut [T], parts: &[&[T]], op: ReduceOp, add: impl Fn(T, T) -> T) {
    for (rank, values) in parts.iter().enumerate() {
        if rank == 0 {
            out.copy_from_slice(values);
            continue;
        }
        for (o, &v) in out.iter_mut().zip(*values) {
            *o = match op {
                ReduceOp::Sum => add(*o, v),
                ReduceOp::Max => v.max(*o),
                ReduceOp::Min => v.min(*o),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sums in another order would have other bits.
    #[test]
    fn in_place_has_the_bits_of_rank_order() {
        let len = 2 * BLOCK + 3;
        let parts: Vec<Vec<f32>> = (0..4)
            .map(|r| {
                (0..len)
                    .map(|i| ((i * 7 + r * 13) % 101) as f32 * 0.1 + 1e-3)
                    .collect()
            })
            .collect();
        let bytes: Vec<&[u8]> = parts.iter().map(|p| bytemuck::cast_slice(p)).collect();
        for op in [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min] {
            let mut expected = vec![0.0f32; len];
            reduce_in_rank_order(&mut (&mut expected).into(), &bytes, op).unwrap();
            for (rank, part) in parts.iter().enumerate() {
                let mut others = bytes.clone();
                others.remove(rank);
                let mut own = part.clone();
                reduce_in_place(&mut (&mut own).into(), rank, &others, op).unwrap();
                assert_eq!(own, expected, "{rank} {op:?}");
            }
        }
        let mut reversed = vec![0.0f32; len];
        let backwards: Vec<&[u8]> = bytes.iter().rev().copied().collect();
        reduce_in_rank_order(&mut (&mut reversed).into(), &backwards, ReduceOp::Sum).unwrap();
        let mut expected = vec![0.0f32; len];
        reduce_in_rank_order(&mut (&mut expected).into(), &bytes, ReduceOp::Sum).unwrap();
        assert_ne!(reversed, expected);
    }
}

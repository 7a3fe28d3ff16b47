//! One pass in place.

use std::ops::Range;

use pulp::Simd;

use super::RopeDims;
use crate::simd::fma;
use crate::{Cpu, RowsMut};

pub(super) fn rotate(
    cpu: Cpu,
    dims: &RopeDims,
    positions: &[u32],
    tables: (&[f32], &[f32]),
    sign: f32,
    x: RowsMut<'_>,
) {
    let x = &x;
    cpu.for_ranges(dims.tokens, 32, |tokens| {
        dispatch!(
            cpu,
            rotate_rows,
            dims,
            positions,
            tables,
            sign,
            x,
            tokens.clone()
        );
    });
}

#[inline(always)]
fn rotate_rows<S: Simd>(
    _: S,
    dims: &RopeDims,
    positions: &[u32],
    (cos, sin): (&[f32], &[f32]),
    sign: f32,
    x: &RowsMut<'_>,
    tokens: Range<usize>,
) {
    let half = dims.head_dim / 2;
    for t in tokens {
        let position = positions[t] as usize * half;
        let (cos, sin) = (&cos[position..][..half], &sin[position..][..half]);
        // SAFETY: no other thread has this token.
        let row = unsafe { x.row_shared(t) };
        for head in row.chunks_exact_mut(dims.head_dim) {
            let (low, high) = head.split_at_mut(half);
            let pairs = low.iter_mut().zip(high);
            for ((low, high), (&c, &s)) in pairs.zip(cos.iter().zip(sin)) {
                let (a, b, s) = (*low, *high, s * sign);
                *low = fma::<S>(a, c, -(b * s));
                *high = fma::<S>(b, c, a * s);
            }
        }
    }
}

//! One pass each way.

use std::ops::Range;

use pulp::Simd;

use crate::rows::SharedMut;
use crate::simd::{fma, sigmoid};
use crate::{Cpu, Rows, RowsMut};

const ROW_STEP: usize = 16;

pub(super) fn forward(cpu: Cpu, gate: Rows<'_>, up: Rows<'_>, y: &mut [f32]) {
    let (width, y) = (gate.width(), SharedMut::new(y));
    cpu.for_ranges(gate.rows(), ROW_STEP, |tokens| {
        // SAFETY: for_ranges hands out disjoint ranges.
        let y = unsafe { y.range(tokens.start * width..tokens.end * width) };
        dispatch!(cpu, forward_rows, gate, up, y, tokens.clone());
    });
}

#[inline(always)]
fn forward_rows<S: Simd>(_: S, gate: Rows<'_>, up: Rows<'_>, y: &mut [f32], tokens: Range<usize>) {
    for (t, y) in tokens.zip(y.chunks_mut(gate.width().max(1))) {
        for ((y, &g), &u) in y.iter_mut().zip(gate.row(t)).zip(up.row(t)) {
            *y = g * sigmoid::<S>(g) * u;
        }
    }
}

pub(super) fn backward(
    cpu: Cpu,
    dy: &[f32],
    gate: Rows<'_>,
    up: Rows<'_>,
    dgate: RowsMut<'_>,
    dup: RowsMut<'_>,
) {
    let (dgate, dup) = (&dgate, &dup);
    cpu.for_ranges(gate.rows(), ROW_STEP, |tokens| {
        dispatch!(
            cpu,
            backward_rows,
            dy,
            (gate, up),
            (dgate, dup),
            tokens.clone()
        );
    });
}

#[inline(always)]
fn backward_rows<S: Simd>(
    _: S,
    dy: &[f32],
    (gate, up): (Rows<'_>, Rows<'_>),
    (dgate, dup): (&RowsMut<'_>, &RowsMut<'_>),
    tokens: Range<usize>,
) {
    let width = gate.width();
    for t in tokens {
        // SAFETY: no other thread has this token, and the two are exclusive borrows of different elements.
        let (dgate, dup) = unsafe { (dgate.row_shared(t), dup.row_shared(t)) };
        let inputs = dy[t * width..][..width]
            .iter()
            .zip(gate.row(t).iter().zip(up.row(t)));
        for ((dgate, dup), (&dy, (&g, &u))) in dgate.iter_mut().zip(dup).zip(inputs) {
            let s = sigmoid::<S>(g);
            *dgate = dy * u * s * fma::<S>(g, 1.0 - s, 1.0);
            *dup = dy * (g * s);
        }
    }
}

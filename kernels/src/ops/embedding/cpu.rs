//! Copies and ordered sums of rows.

use std::ops::Range;

use pulp::Simd;

use super::EmbeddingDims;
use crate::Cpu;
use crate::rows::{RowsMut, SharedMut};
use crate::simd::LANES;

pub(super) fn gather(cpu: Cpu, dims: &EmbeddingDims, table: &[f32], ids: &[u32], y: &mut [f32]) {
    let (width, y) = (dims.width, SharedMut::new(y));
    cpu.for_ranges(ids.len(), 64, |range| {
        // SAFETY: for_ranges hands out disjoint ranges.
        let y = unsafe { y.range(range.start * width..range.end * width) };
        for (y, &id) in y.chunks_mut(width.max(1)).zip(&ids[range]) {
            match dims.row(id) {
                Some(row) => y.copy_from_slice(&table[row * width..][..width]),
                None => y.fill(0.0),
            }
        }
    });
}

/// Threads split the columns, so each sees every token in order.
pub(super) fn scatter_add(
    cpu: Cpu,
    dims: &EmbeddingDims,
    dy: &[f32],
    ids: &[u32],
    dtable: &mut [f32],
) {
    if dims.width == 0 {
        return;
    }
    let dtable = RowsMut::contiguous(dtable, dims.width);
    cpu.for_ranges(dims.width, 4 * LANES, |columns| {
        dispatch!(cpu, add_band, dims, dy, ids, columns.clone(), &dtable);
    });
}

#[inline(always)]
fn add_band<S: Simd>(
    _: S,
    dims: &EmbeddingDims,
    dy: &[f32],
    ids: &[u32],
    columns: Range<usize>,
    dtable: &RowsMut<'_>,
) {
    for (dy, &id) in dy.chunks(dims.width).zip(ids) {
        let Some(row) = dims.row(id) else { continue };
        // SAFETY: bands of columns are disjoint between threads, and the band is all that is touched:
        // the slice is made from the band alone.
        let row = unsafe { dtable.band_shared(row, columns.clone()) };
        for (sum, &x) in row.iter_mut().zip(&dy[columns.clone()]) {
            *sum += x;
        }
    }
}

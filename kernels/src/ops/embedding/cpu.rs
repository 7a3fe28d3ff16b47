//! Copies and ordered sums of rows.

use std::ops::Range;

use pulp::Simd;

use crate::Cpu;
use crate::rows::{RowsMut, SharedMut};
use crate::simd::LANES;

pub(super) fn gather(cpu: Cpu, width: usize, table: &[f32], ids: &[u32], y: &mut [f32]) {
    let y = SharedMut::new(y);
    cpu.for_ranges(ids.len(), 64, |range| {
        // SAFETY: for_ranges hands out disjoint ranges.
        let y = unsafe { y.range(range.start * width..range.end * width) };
        for (y, &id) in y.chunks_mut(width.max(1)).zip(&ids[range]) {
            y.copy_from_slice(&table[id as usize * width..][..width]);
        }
    });
}

/// Threads split the columns, so each sees every token in order.
pub(super) fn scatter_add(cpu: Cpu, width: usize, dy: &[f32], ids: &[u32], dtable: &mut [f32]) {
    if width == 0 {
        return;
    }
    let dtable = RowsMut::contiguous(dtable, width);
    cpu.for_ranges(width, 4 * LANES, |columns| {
        dispatch!(cpu, add_band, dy, ids, columns.clone(), &dtable);
    });
}

#[inline(always)]
fn add_band<S: Simd>(_: S, dy: &[f32], ids: &[u32], columns: Range<usize>, dtable: &RowsMut<'_>) {
    let width = dtable.width();
    for (dy, &id) in dy.chunks(width).zip(ids) {
        // SAFETY: bands of columns are disjoint between threads, and the band is all that is touched:
        // the slice is made from the band alone.
        let row = unsafe { dtable.band_shared(id as usize, columns.clone()) };
        for (sum, &x) in row.iter_mut().zip(&dy[columns.clone()]) {
            *sum += x;
        }
    }
}

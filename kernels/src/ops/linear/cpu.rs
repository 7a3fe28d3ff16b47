//! Column sums; the products are GEMMs.

use pulp::Simd;

use crate::rows::SharedMut;
use crate::simd::LANES;
use crate::{Cpu, Rows};

pub(super) fn column_sums(cpu: Cpu, dy: Rows<'_>, accumulate: bool, sums: &mut [f32]) {
    let width = sums.len();
    let sums = SharedMut::new(sums);
    cpu.for_ranges(width, 4 * LANES, |columns| {
        // SAFETY: for_ranges hands out disjoint ranges.
        let sums = unsafe { sums.range(columns.clone()) };
        dispatch!(
            cpu,
            band_sums,
            dy.columns(columns.clone()),
            accumulate,
            sums
        );
    });
}

#[inline(always)]
fn band_sums<S: Simd>(_: S, dy: Rows<'_>, accumulate: bool, sums: &mut [f32]) {
    const TILE: usize = 4 * LANES;
    for (tile, sums) in sums.chunks_mut(TILE).enumerate() {
        let first = tile * TILE;
        let mut lanes = [0f64; TILE];
        for t in 0..dy.rows() {
            let row = &dy.row(t)[first..][..sums.len()];
            if let Ok(row) = <&[f32; TILE]>::try_from(row) {
                for (lane, &x) in lanes.iter_mut().zip(row) {
                    *lane += f64::from(x);
                }
            } else {
                for (lane, &x) in lanes.iter_mut().zip(row) {
                    *lane += f64::from(x);
                }
            }
        }
        for (sum, lane) in sums.iter_mut().zip(lanes) {
            let kept = if accumulate { f64::from(*sum) } else { 0.0 };
            *sum = (kept + lane) as f32;
        }
    }
}

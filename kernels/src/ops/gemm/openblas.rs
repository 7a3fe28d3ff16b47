//! The system's OpenBLAS, in builds with the feature `openblas`.
//!
//! It is told to stay on the calling thread: ranks are threads already, and a rank's own threads each take rows of C,
//! so that a result does not depend on how many they are.

use std::ffi::c_int;
use std::sync::Once;

use super::Gemm;
use crate::{Cpu, RowsMut};

const ROW_MAJOR: c_int = 101;
const PLAIN: c_int = 111;
const TRANSPOSED: c_int = 112;

#[link(name = "openblas")]
unsafe extern "C" {
    fn cblas_sgemm(
        order: c_int,
        transpose_a: c_int,
        transpose_b: c_int,
        m: c_int,
        n: c_int,
        k: c_int,
        alpha: f32,
        a: *const f32,
        lda: c_int,
        b: *const f32,
        ldb: c_int,
        beta: f32,
        c: *mut f32,
        ldc: c_int,
    );
    fn openblas_set_num_threads(threads: c_int);
}

static ONE_THREAD: Once = Once::new();

/// Rows of C that a thread takes at least.
const ROWS: usize = 64;

pub(super) fn gemm(cpu: Cpu, dims: &Gemm, a: &[f32], b: &[f32], c: &mut [f32]) {
    let Gemm { m, n, k, .. } = *dims;
    if m == 0 || n == 0 {
        return;
    }
    if k == 0 {
        let mut rows = RowsMut::new(c, m, n, dims.ldc);
        for row in 0..m {
            for value in rows.row(row) {
                *value = if dims.beta == 0.0 {
                    0.0
                } else {
                    *value * dims.beta
                };
            }
        }
        return;
    }
    // SAFETY: it takes a number.
    ONE_THREAD.call_once(|| unsafe { openblas_set_num_threads(1) });
    let (a, b, c) = (
        a.as_ptr() as usize,
        b.as_ptr() as usize,
        c.as_mut_ptr() as usize,
    );
    let transposed = |is| if is { TRANSPOSED } else { PLAIN };
    cpu.for_ranges(m, ROWS, |rows| {
        let skip = rows.start * if dims.transpose_a { 1 } else { dims.lda };
        // SAFETY: the caller checked that every element of [m, k], [k, n] and [m, n] under these strides lies inside
        // its slice. `c` is an exclusive borrow, of which each range has rows of its own.
        unsafe {
            cblas_sgemm(
                ROW_MAJOR,
                transposed(dims.transpose_a),
                transposed(dims.transpose_b),
                size(rows.len()),
                size(n),
                size(k),
                dims.alpha,
                (a as *const f32).add(skip),
                size(dims.lda),
                b as *const f32,
                size(dims.ldb),
                dims.beta,
                (c as *mut f32).add(rows.start * dims.ldc),
                size(dims.ldc),
            );
        }
    });
}

fn size(n: usize) -> c_int {
    c_int::try_from(n).expect("OpenBLAS counts to 2^31 - 1")
}

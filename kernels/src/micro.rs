//! Small matrix products on cache-resident, padded tiles: what attention is made of.
//!
//! A general GEMM packs its operands and picks a blocking at every call; attention multiplies tiles of
//! 64 rows, whose operands it packs once and uses many times. So this kernel assumes padding instead of
//! handling edges: rows of C come in multiples of [`ROWS`], columns in multiples of [`COLUMNS`].

use pulp::Simd;

/// Rows of C come in multiples of this.
pub(crate) const ROWS: usize = 8;
/// Columns of C come in multiples of this.
pub(crate) const COLUMNS: usize = 16;

/// Left operand: element (i, p) is at `i * row + p * col`.
#[derive(Clone, Copy)]
pub(crate) struct Left<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) row: usize,
    pub(crate) col: usize,
}

/// Right operand: row p starts at `p * row`.
#[derive(Clone, Copy)]
pub(crate) struct Right<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) row: usize,
}

/// Output: row i starts at `i * row`.
pub(crate) struct Out<'a> {
    pub(crate) data: &'a mut [f32],
    pub(crate) row: usize,
    /// Adds to what is there.
    pub(crate) accumulate: bool,
}

/// C [m, n] = A [m, k] B [k, n], or C += A B.
#[inline(always)]
pub(crate) fn product<S: Simd>(
    simd: S,
    (m, n, k): (usize, usize, usize),
    a: Left<'_>,
    b: Right<'_>,
    c: Out<'_>,
) {
    if m == 0 || n == 0 || k == 0 {
        return;
    }
    assert!(m.is_multiple_of(ROWS) && n.is_multiple_of(COLUMNS));
    assert!((m - 1) * a.row + (k - 1) * a.col < a.data.len());
    assert!((k - 1) * b.row + n <= b.data.len());
    assert!((m - 1) * c.row + n <= c.data.len());
    let mut j = 0;
    while j < n {
        let (height, width) = tile(S::F32_LANES, n - j);
        for i in (0..m).step_by(height) {
            let at = Pointers {
                k,
                a: a.data[i * a.row..].as_ptr(),
                a_row: a.row,
                a_col: a.col,
                b: b.data[j..].as_ptr(),
                b_row: b.row,
                c: c.data[i * c.row + j..].as_mut_ptr(),
                c_row: c.row,
                accumulate: c.accumulate,
            };
            // SAFETY: by the assertions, all elements of the tile's rows i..i + height and columns
            // j..j + width, with all k terms, lie inside the three slices (tiles divide m and n evenly).
            unsafe {
                match (height, width / S::F32_LANES) {
                    (4, 4) => kernel::<S, 4, 4>(simd, at),
                    (4, 3) => kernel::<S, 4, 3>(simd, at),
                    (8, 2) => kernel::<S, 8, 2>(simd, at),
                    (8, 1) => kernel::<S, 8, 1>(simd, at),
                    (4, 2) => kernel::<S, 4, 2>(simd, at),
                    _ => kernel::<S, 2, 16>(simd, at),
                }
            }
        }
        j += width;
    }
}

/// Rows and columns of the next tile: enough accumulators to hide the latency of FMA, few enough for the
/// registers (32 of AVX-512 and NEON, 16 of AVX2).
#[inline(always)]
fn tile(lanes: usize, columns: usize) -> (usize, usize) {
    match lanes {
        16 if columns >= 64 => (4, 64),
        16 if columns >= 48 => (4, 48),
        16 if columns >= 32 => (8, 32),
        16 => (8, 16),
        8 => (4, 16),
        4 => (4, 16),
        _ => (2, 16),
    }
}

struct Pointers {
    k: usize,
    a: *const f32,
    a_row: usize,
    a_col: usize,
    b: *const f32,
    b_row: usize,
    c: *mut f32,
    c_row: usize,
    accumulate: bool,
}

/// # Safety
/// A [M, k], B [k, N vectors] and C [M, N vectors] are valid at the given pointers and strides.
#[inline(always)]
unsafe fn kernel<S: Simd, const M: usize, const N: usize>(simd: S, at: Pointers) {
    // Lanes other than those of a kernel's own arm compile to nothing.
    if !N.is_multiple_of((COLUMNS / S::F32_LANES).min(N)) {
        return;
    }
    let lanes = S::F32_LANES;
    let mut sums = [[simd.splat_f32s(0.0); N]; M];
    // SAFETY: the caller's contract.
    unsafe {
        for p in 0..at.k {
            let b = at.b.add(p * at.b_row);
            let mut row = [simd.splat_f32s(0.0); N];
            for (j, x) in row.iter_mut().enumerate() {
                *x = b.add(j * lanes).cast::<S::f32s>().read_unaligned();
            }
            for (i, sums) in sums.iter_mut().enumerate() {
                let a = simd.splat_f32s(*at.a.add(i * at.a_row + p * at.a_col));
                for (sum, &x) in sums.iter_mut().zip(&row) {
                    *sum = simd.mul_add_e_f32s(a, x, *sum);
                }
            }
        }
        for (i, sums) in sums.iter().enumerate() {
            for (j, &sum) in sums.iter().enumerate() {
                let c = at.c.add(i * at.c_row + j * lanes).cast::<S::f32s>();
                let sum = if at.accumulate {
                    simd.add_f32s(c.read_unaligned(), sum)
                } else {
                    sum
                };
                c.write_unaligned(sum);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Left, Out, Right, product};
    use crate::testing::{all_cpus, assert_close, random, wide};

    #[test]
    fn every_tile_shape_agrees_with_plain_sums() {
        for cpu in all_cpus() {
            for (m, n, k) in [
                (8, 16, 1),
                (16, 32, 7),
                (8, 48, 64),
                (24, 64, 3),
                (8, 176, 33),
            ] {
                for (a_row, a_col) in [(k + 3, 1), (1, m + 5)] {
                    for accumulate in [false, true] {
                        let a = random(1, (m + 5) * (k + 5));
                        let (b, mut c) = (random(2, k * (n + 4)), random(3, m * (n + 2)));
                        let (a64, b64, mut expected) = (wide(&a), wide(&b), wide(&c));
                        for i in 0..m {
                            for j in 0..n {
                                let sum: f64 = (0..k)
                                    .map(|p| a64[i * a_row + p * a_col] * b64[p * (n + 4) + j])
                                    .sum();
                                let c = &mut expected[i * (n + 2) + j];
                                *c = if accumulate { *c + sum } else { sum };
                            }
                        }
                        let left = Left {
                            data: &a,
                            row: a_row,
                            col: a_col,
                        };
                        let right = Right {
                            data: &b,
                            row: n + 4,
                        };
                        let out = Out {
                            data: &mut c,
                            row: n + 2,
                            accumulate,
                        };
                        dispatch!(cpu, product, (m, n, k), left, right, out);
                        assert_close("c", &c, &expected, 1e-6);
                    }
                }
            }
        }
    }
}

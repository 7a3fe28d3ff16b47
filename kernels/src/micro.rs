//! Small matrix products on cache-resident, padded tiles: what attention is made of.
//!
//! A general GEMM packs its operands and picks a blocking at every call; attention multiplies tiles of
//! 64 rows, whose operands it packs once and uses many times. So this kernel assumes padding instead of
//! handling edges: rows of C come in multiples of [`ROWS`], columns in multiples of [`COLUMNS`].

use std::ops::Range;

use pulp::Simd;

use crate::Cpu;

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

/// Which part of a product with a block of causal probabilities is not known to be zero or unused.
///
/// Queries are rows `r` and keys columns `c` of a block; `r` sees `c` if `c <= r + diagonal`.
#[derive(Clone, Copy)]
pub(crate) enum Causal {
    /// C is `[queries, keys]`: elements that are not seen may hold anything afterwards.
    Scores(isize),
    /// A is `[queries, keys]`, zero where not seen.
    Left(isize),
    /// A is `[keys, queries]`, zero where not seen.
    Turned(isize),
}

impl Causal {
    /// Columns of C and terms of the sums that matter to the rows `first..first + height`.
    #[inline(always)]
    fn bounds(self, first: usize, height: usize, n: usize, k: usize) -> (usize, Range<usize>) {
        let seen_by_last = |diagonal: isize, limit: usize| {
            (first + height).saturating_add_signed(diagonal).min(limit)
        };
        match self {
            Self::Scores(diagonal) => (seen_by_last(diagonal, n), 0..k),
            Self::Left(diagonal) => (n, 0..seen_by_last(diagonal, k)),
            Self::Turned(diagonal) => (n, first.saturating_add_signed(-diagonal).min(k)..k),
        }
    }
}

/// C `[m, n]` = A `[m, k]` B `[k, n]`, or C += A B.
#[inline(never)]
pub(crate) fn product(
    cpu: Cpu,
    shape: (usize, usize, usize),
    causal: Causal,
    a: Left<'_>,
    b: Right<'_>,
    c: Out<'_>,
) {
    dispatch!(cpu, product_simd, shape, causal, a, b, c);
}

#[inline(always)]
fn product_simd<S: Simd>(
    simd: S,
    (m, n, k): (usize, usize, usize),
    causal: Causal,
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
            let (columns, terms) = causal.bounds(i, height, n, k);
            if columns <= j {
                continue;
            }
            // With no terms there is nothing to point at; the kernel then adds or writes zeros.
            let first_term = if terms.is_empty() { 0 } else { terms.start };
            // SAFETY: tiles divide m and n evenly and terms lie in 0..k, so by the assertions all elements
            // of rows i..i + height and columns j..j + width, with all terms, lie inside the three slices.
            unsafe {
                let at = Pointers {
                    k: terms.len(),
                    a: a.data.as_ptr().add(i * a.row + first_term * a.col),
                    a_row: a.row,
                    a_col: a.col,
                    b: b.data.as_ptr().add(first_term * b.row + j),
                    b_row: b.row,
                    c: c.data.as_mut_ptr().add(i * c.row + j),
                    c_row: c.row,
                    accumulate: c.accumulate,
                };
                // Constant conditions: only the kernels of the instruction set are compiled.
                if S::F32_LANES == 16 {
                    match width {
                        64 => kernel::<S, 4, 4>(simd, at),
                        48 => kernel::<S, 4, 3>(simd, at),
                        32 => kernel::<S, 8, 2>(simd, at),
                        _ => kernel::<S, 8, 1>(simd, at),
                    }
                } else if S::F32_LANES == 8 {
                    kernel::<S, 4, 2>(simd, at);
                } else if S::F32_LANES == 4 {
                    kernel::<S, 4, 4>(simd, at);
                } else {
                    kernel::<S, 2, 16>(simd, at);
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
        4 | 8 => (4, 16),
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
/// A `[M, k]`, B `[k, N vectors]` and C `[M, N vectors]` are valid at the given pointers and strides.
#[inline(always)]
unsafe fn kernel<S: Simd, const M: usize, const N: usize>(simd: S, at: Pointers) {
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
    use super::{Causal, Left, Out, Right, product};
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
                        let all = Causal::Left(isize::MAX / 2);
                        product(cpu, (m, n, k), all, left, right, out);
                        assert_close("c", &c, &expected, 1e-6);
                    }
                }
            }
        }
    }

    #[test]
    fn causal_products_skip_nothing_that_is_seen() {
        let (queries, keys, e) = (24, 48, 16);
        for cpu in all_cpus() {
            for diagonal in [-30, -8, -1, 0, 3, 20, 47, 100] {
                let sees = |r: usize, c: usize| c as isize <= r as isize + diagonal;
                let mut p = random(1, queries * keys);
                for (i, p) in p.iter_mut().enumerate() {
                    *p = if sees(i / keys, i % keys) { *p } else { 0.0 };
                }
                let (by_key, by_query) = (random(2, keys * e), random(3, queries * e));
                let run = |shape, causal, data, row, col, b| {
                    let mut c = vec![0.0; queries.max(keys) * keys];
                    let out = Out {
                        data: &mut c,
                        row: keys,
                        accumulate: true,
                    };
                    product(
                        cpu,
                        shape,
                        causal,
                        Left { data, row, col },
                        Right { data: b, row: e },
                        out,
                    );
                    c
                };
                let out = run(
                    (queries, e, keys),
                    Causal::Left(diagonal),
                    &p,
                    keys,
                    1,
                    &by_key,
                );
                let turned = run(
                    (keys, e, queries),
                    Causal::Turned(diagonal),
                    &p,
                    1,
                    keys,
                    &by_query,
                );
                let (p64, k64, q64) = (wide(&p), wide(&by_key), wide(&by_query));
                for x in 0..e {
                    for r in 0..queries {
                        let sum: f64 = (0..keys).map(|c| p64[r * keys + c] * k64[c * e + x]).sum();
                        assert!((f64::from(out[r * keys + x]) - sum).abs() <= 1e-5);
                    }
                    for c in 0..keys {
                        let sum: f64 = (0..queries)
                            .map(|r| p64[r * keys + c] * q64[r * e + x])
                            .sum();
                        assert!((f64::from(turned[c * keys + x]) - sum).abs() <= 1e-5);
                    }
                }
                // Scores: A [queries, e], B [e, keys].
                let mut c = vec![f32::NAN; queries * keys];
                let out = Out {
                    data: &mut c,
                    row: keys,
                    accumulate: false,
                };
                let left = Left {
                    data: &by_query,
                    row: e,
                    col: 1,
                };
                let right = Right {
                    data: &by_key,
                    row: keys,
                };
                product(
                    cpu,
                    (queries, keys, e),
                    Causal::Scores(diagonal),
                    left,
                    right,
                    out,
                );
                for (i, &found) in c.iter().enumerate() {
                    let (r, c) = (i / keys, i % keys);
                    let sum: f64 = (0..e).map(|x| q64[r * e + x] * k64[x * keys + c]).sum();
                    assert!(!sees(r, c) || (f64::from(found) - sum).abs() <= 1e-5);
                }
            }
        }
    }
}

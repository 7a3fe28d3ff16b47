//! Matrix product: C = alpha op(A) op(B) + beta C.
//!
//! Row-major f32 with leading dimensions; op is the identity or the transpose:
//!
//! | constructor | A | B | C |
//! |---|---|---|---|
//! | [`Gemm::nn`] | `[m, k]` | `[k, n]` | `[m, n]` |
//! | [`Gemm::nt`] | `[m, k]` | `[n, k]` | `[m, n]` |
//! | [`Gemm::tn`] | `[k, m]` | `[k, n]` | `[m, n]` |
//!
//! With beta = 0, C is written and never read, so it may hold anything, NaN included. Sums run in f32,
//! blocked along k. No scratch.

#[cfg(not(feature = "openblas"))]
mod cpu;
#[cfg(feature = "openblas")]
mod openblas;
mod rate;
pub mod reference;
#[cfg(test)]
mod tests;

pub use rate::measure_rate;

#[cfg(not(feature = "openblas"))]
use cpu as library;
#[cfg(feature = "openblas")]
use openblas as library;

use crate::cuda::ops::gemm as device;
use crate::{On, Rows, RowsMut};

/// What to multiply. Built by [`Gemm::nn`], [`Gemm::nt`] or [`Gemm::tn`], then adjusted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gemm {
    /// Rows of C.
    pub m: usize,
    /// Columns of C.
    pub n: usize,
    /// Length of the sums.
    pub k: usize,
    /// A is stored as `[k, m]`.
    pub transpose_a: bool,
    /// B is stored as `[n, k]`.
    pub transpose_b: bool,
    /// Elements between the rows of A as stored.
    pub lda: usize,
    /// Elements between the rows of B as stored.
    pub ldb: usize,
    /// Elements between the rows of C.
    pub ldc: usize,
    /// Factor of the product.
    pub alpha: f32,
    /// Factor of what C held: 0 overwrites, 1 accumulates.
    pub beta: f32,
}

impl Gemm {
    /// C = A B for contiguous A `[m, k]`, B `[k, n]`, C `[m, n]`.
    pub fn nn(m: usize, n: usize, k: usize) -> Self {
        Self::contiguous(m, n, k, false, false)
    }

    /// C = A B^T for contiguous A `[m, k]`, B `[n, k]`, C `[m, n]`.
    pub fn nt(m: usize, n: usize, k: usize) -> Self {
        Self::contiguous(m, n, k, false, true)
    }

    /// C = A^T B for contiguous A `[k, m]`, B `[k, n]`, C `[m, n]`.
    pub fn tn(m: usize, n: usize, k: usize) -> Self {
        Self::contiguous(m, n, k, true, false)
    }

    /// Other leading dimensions.
    #[must_use]
    pub fn strides(self, lda: usize, ldb: usize, ldc: usize) -> Self {
        Self {
            lda,
            ldb,
            ldc,
            ..self
        }
    }

    /// Another factor of the product.
    #[must_use]
    pub fn alpha(self, alpha: f32) -> Self {
        Self { alpha, ..self }
    }

    /// Adds to C instead of overwriting it, if so.
    #[must_use]
    pub fn accumulate(self, accumulate: bool) -> Self {
        let beta = if accumulate { 1.0 } else { 0.0 };
        Self { beta, ..self }
    }

    /// 2 m n k.
    pub fn flops(&self) -> f64 {
        2.0 * self.m as f64 * self.n as f64 * self.k as f64
    }

    fn contiguous(m: usize, n: usize, k: usize, transpose_a: bool, transpose_b: bool) -> Self {
        Self {
            m,
            n,
            k,
            transpose_a,
            transpose_b,
            lda: if transpose_a { m } else { k },
            ldb: if transpose_b { k } else { n },
            ldc: n,
            alpha: 1.0,
            beta: 0.0,
        }
    }
}

/// C = alpha op(A) op(B) + beta C.
///
/// # Panics
/// If a slice is too short for its shape and leading dimension, or a leading dimension is smaller than a row.
#[track_caller]
pub fn gemm<'on>(on: impl Into<On<'on>>, dims: &Gemm, a: &[f32], b: &[f32], c: &mut [f32]) {
    let Gemm { m, n, k, .. } = *dims;
    let (a_rows, a_width) = if dims.transpose_a { (k, m) } else { (m, k) };
    let (b_rows, b_width) = if dims.transpose_b { (n, k) } else { (k, n) };
    check("A", a.len(), a_rows, a_width, dims.lda);
    check("B", b.len(), b_rows, b_width, dims.ldb);
    check("C", c.len(), m, n, dims.ldc);
    match on.into() {
        On::Cpu(cpu) => library::gemm(cpu, dims, a, b, c),
        On::Device(unified) => unified.run(|call| {
            let a = call.rows(Rows::new(a, a_rows, a_width, dims.lda))?;
            let b = call.rows(Rows::new(b, b_rows, b_width, dims.ldb))?;
            let c = call.rows_mut(RowsMut::new(c, m, n, dims.ldc))?;
            device::gemm(call.device(), dims, a, b, c)
        }),
    }
}

#[track_caller]
fn check(name: &str, len: usize, rows: usize, width: usize, stride: usize) {
    assert!(
        width <= stride,
        "gemm: {name} has rows of {width} elements but leading dimension {stride}"
    );
    let needed = if width == 0 {
        Some(0)
    } else {
        rows.checked_sub(1)
            .map_or(Some(0), |last| last.checked_mul(stride)?.checked_add(width))
    };
    assert!(
        needed.is_some_and(|needed| needed <= len),
        "gemm: {name} has {len} elements, [{rows}, {width}] with leading dimension {stride} needs {needed:?}"
    );
}

//! The product in f64, one sum at a time.

use super::Gemm;

/// C = alpha op(A) op(B) + beta C; with beta = 0, C is not read.
pub fn gemm(dims: &Gemm, a: &[f64], b: &[f64], c: &mut [f64]) {
    for i in 0..dims.m {
        for j in 0..dims.n {
            let sum: f64 = (0..dims.k)
                .map(|p| {
                    let a = if dims.transpose_a {
                        a[p * dims.lda + i]
                    } else {
                        a[i * dims.lda + p]
                    };
                    let b = if dims.transpose_b {
                        b[j * dims.ldb + p]
                    } else {
                        b[p * dims.ldb + j]
                    };
                    a * b
                })
                .sum();
            let c = &mut c[i * dims.ldc + j];
            let kept = if dims.beta == 0.0 {
                0.0
            } else {
                f64::from(dims.beta) * *c
            };
            *c = f64::from(dims.alpha) * sum + kept;
        }
    }
}

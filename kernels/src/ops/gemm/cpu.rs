//! The `gemm` crate, which picks AVX-512, AVX2 or portable code at run time.
//!
//! Measured on one core of an AVX-512 server, GFLOP/s, geometric mean over the shapes of a small Llama:
//! gemm with x86-v4 150, matrixmultiply 136, gemm with AVX2 only 71, faer 60.
//!
//! Packed weights are not kept. The crate packs both operands inside each product, which is 5 % of the samples of a
//! step of 31.6M parameters over 1,024 tokens a rank, weights and activations together; keeping the weights' share from
//! one micro-batch to the next would save a part of that from the second on, for a second copy of every weight, in two
//! orders. A GEMM of our own that takes packed operands reached 105 to 135 GFLOP/s where the crate reaches 149, so it
//! would lose more than it saves.

use ::gemm::Parallelism;

use super::Gemm;
use crate::Cpu;

pub(super) fn gemm(cpu: Cpu, dims: &Gemm, a: &[f32], b: &[f32], c: &mut [f32]) {
    let Gemm {
        m,
        n,
        k,
        lda,
        ldb,
        ldc,
        alpha,
        beta,
        ..
    } = *dims;
    if m == 0 || n == 0 {
        return;
    }
    let (lda, ldb, ldc) = (lda as isize, ldb as isize, ldc as isize);
    let (a_col, a_row) = if dims.transpose_a { (lda, 1) } else { (1, lda) };
    let (b_col, b_row) = if dims.transpose_b { (ldb, 1) } else { (1, ldb) };
    let parallelism = match cpu.threads() {
        1 => Parallelism::None,
        threads => Parallelism::Rayon(threads),
    };
    // SAFETY: the caller checked that every element of [m, k], [k, n] and [m, n] under these strides lies
    // inside its slice; `c` is an exclusive borrow, so it overlaps neither operand.
    unsafe {
        ::gemm::gemm(
            m,
            n,
            k,
            c.as_mut_ptr(),
            1,
            ldc,
            beta != 0.0,
            a.as_ptr(),
            a_col,
            a_row,
            b.as_ptr(),
            b_col,
            b_row,
            beta,
            alpha,
            false,
            false,
            false,
            parallelism,
        );
    }
}

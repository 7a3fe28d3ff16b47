//! The product by the device's library (cuBLASLt on a GPU).

use crate::cuda::{CudaError, Device, Rows, RowsMut};
use crate::ops::gemm::Gemm;

/// C = alpha op(A) op(B) + beta C; with beta = 0, C is not read.
///
/// # Panics
/// If the rows are not as `dims` has them stored.
#[track_caller]
pub fn gemm(
    device: &Device,
    dims: &Gemm,
    a: Rows<'_>,
    b: Rows<'_>,
    c: RowsMut<'_>,
) -> Result<(), CudaError> {
    let Gemm { m, n, k, .. } = *dims;
    let a_shape = if dims.transpose_a { (k, m) } else { (m, k) };
    let b_shape = if dims.transpose_b { (n, k) } else { (k, n) };
    check("A", (a.shape(), a.stride()), (a_shape, dims.lda));
    check("B", (b.shape(), b.stride()), (b_shape, dims.ldb));
    check("C", (c.shape(), c.stride()), ((m, n), dims.ldc));
    // SAFETY: the rows are as the dimensions have them; C is exclusive.
    unsafe { device.gemm(dims, [a.address(), b.address(), c.address()]) }
}

#[track_caller]
fn check(name: &str, found: ((usize, usize), usize), expected: ((usize, usize), usize)) {
    assert!(
        found == expected,
        "gemm: {name} has shape and stride {found:?}, the dimensions say {expected:?}"
    );
}

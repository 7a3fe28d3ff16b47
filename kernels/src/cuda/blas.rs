//! cuBLASLt: matrix products in f32 with f32 sums (no TF32), joined to the stream of a [`Gpu`](super::Gpu).

use std::collections::BTreeMap;
use std::ffi::c_void;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys;
use cudarc::driver::sys::CUstream;

use super::CudaError;
use super::library::Library;
use crate::ops::gemm::Gemm;

/// What NVIDIA recommends for Hopper; more than its algorithms ask for elsewhere.
pub(super) const WORKSPACE_BYTES: usize = 32 << 20;

/// The library's handle, its workspace, and the algorithms chosen so far.
#[derive(Debug)]
pub(super) struct Blas {
    handle: sys::cublasLtHandle_t,
    workspace: u64,
    chosen: BTreeMap<Key, sys::cublasLtMatmulAlgo_t>,
}

// SAFETY: the handle may be used by any thread, one at a time; it is owned and reached through `&mut`.
unsafe impl Send for Blas {}

/// What an algorithm is chosen by: sizes, leading dimensions, transposes, alignment of A, B and C.
type Key = ([usize; 6], [bool; 2], [u32; 3]);

impl Blas {
    /// With a workspace of [`WORKSPACE_BYTES`] on the device, which the caller keeps.
    pub(super) fn new(workspace: u64) -> Result<Self, CudaError> {
        Library::CublasLt.load()?;
        let handle = result::create_handle().map_err(|e| failed("start cuBLASLt", e))?;
        Ok(Self {
            handle,
            workspace,
            chosen: BTreeMap::new(),
        })
    }

    /// C = alpha op(A) op(B) + beta C, all row-major.
    ///
    /// # Safety
    /// A, B and C lie at these addresses with the shapes of `dims`, which is not empty.
    pub(super) unsafe fn gemm(
        &mut self,
        stream: CUstream,
        dims: &Gemm,
        [a, b, c]: [u64; 3],
    ) -> Result<(), CudaError> {
        let Gemm {
            m,
            n,
            k,
            lda,
            ldb,
            ldc,
            ..
        } = *dims;
        let failed = |error| failed(&format!("multiply [{m}, {k}] by [{k}, {n}]"), error);
        // cuBLASLt counts columns first. Row-major C is column-major C^T = op(B)^T op(A)^T, and a row-major
        // matrix is its own transpose there: B comes first, and each is transposed just if it was for us.
        let operation = Operation::new(dims.transpose_b, dims.transpose_a).map_err(failed)?;
        let (b_width, b_rows) = if dims.transpose_b { (k, n) } else { (n, k) };
        let (a_width, a_rows) = if dims.transpose_a { (m, k) } else { (k, m) };
        let first = Layout::new(b_width, b_rows, ldb).map_err(failed)?;
        let second = Layout::new(a_width, a_rows, lda).map_err(failed)?;
        let output = Layout::new(n, m, ldc).map_err(failed)?;
        let alignments = [a, b, c].map(alignment);
        let key: Key = (
            [m, n, k, lda, ldb, ldc],
            [dims.transpose_a, dims.transpose_b],
            alignments,
        );
        let algorithm = match self.chosen.get(&key) {
            Some(&algorithm) => algorithm,
            None => {
                let preference = Preference::new(alignments).map_err(failed)?;
                // SAFETY: all descriptors live.
                let found = unsafe {
                    result::get_matmul_algo_heuristic(
                        self.handle,
                        operation.0,
                        first.0,
                        second.0,
                        output.0,
                        output.0,
                        preference.0,
                    )
                };
                let algorithm = found.map_err(failed)?.algo;
                self.chosen.insert(key, algorithm);
                algorithm
            }
        };
        let pointer = |address: u64| address as *const c_void;
        // SAFETY: the caller's; alpha and beta are read before the call returns.
        unsafe {
            result::matmul(
                self.handle,
                operation.0,
                std::ptr::from_ref(&dims.alpha).cast(),
                std::ptr::from_ref(&dims.beta).cast(),
                pointer(b),
                first.0,
                pointer(a),
                second.0,
                pointer(c),
                output.0,
                pointer(c).cast_mut(),
                output.0,
                &algorithm,
                pointer(self.workspace).cast_mut(),
                WORKSPACE_BYTES,
                stream.cast(),
            )
        }
        .map_err(failed)
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        // SAFETY: ours, and used for the last time.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

/// The largest power of two up to 256 that divides an address: bands of a buffer start anywhere.
fn alignment(address: u64) -> u32 {
    1 << address.trailing_zeros().min(8)
}

fn failed(what: &str, error: CublasError) -> CudaError {
    CudaError::Call {
        what: what.to_owned(),
        reason: error.to_string(),
    }
}

struct Operation(sys::cublasLtMatmulDesc_t);

impl Operation {
    fn new(transpose_first: bool, transpose_second: bool) -> Result<Self, CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let this = Self(result::create_matmul_desc(
            compute,
            sys::cudaDataType::CUDA_R_32F,
        )?);
        for (attribute, transpose) in [
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSA, transpose_first),
            (Attribute::CUBLASLT_MATMUL_DESC_TRANSB, transpose_second),
        ] {
            // CUBLAS_OP_N and CUBLAS_OP_T.
            let operation = i32::from(transpose);
            let value = std::ptr::from_ref(&operation).cast();
            // SAFETY: the descriptor lives, the value is copied.
            unsafe {
                result::set_matmul_desc_attribute(this.0, attribute, value, size_of::<i32>())?
            };
        }
        Ok(this)
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        // SAFETY: created by `new`.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    fn new(width: usize, rows: usize, stride: usize) -> Result<Self, CublasError> {
        let (width, rows, stride) = (width as u64, rows as u64, stride as i64);
        result::create_matrix_layout(sys::cudaDataType::CUDA_R_32F, width, rows, stride).map(Self)
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: created by `new`.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    /// For operands A, B and C that lie at multiples of these.
    fn new([a, b, c]: [u32; 3]) -> Result<Self, CublasError> {
        use sys::cublasLtMatmulPreferenceAttributes_t as Attribute;
        let this = Self(result::create_matmul_pref()?);
        let bytes = WORKSPACE_BYTES;
        let attribute = Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let value = std::ptr::from_ref(&bytes).cast();
        // SAFETY: the preference lives, the value is copied.
        unsafe { result::set_matmul_pref_attribute(this.0, attribute, value, size_of::<usize>())? };
        for (attribute, alignment) in [
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, c),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, c),
        ] {
            let value = std::ptr::from_ref(&alignment).cast();
            // SAFETY: as above.
            unsafe {
                result::set_matmul_pref_attribute(this.0, attribute, value, size_of::<u32>())?
            };
        }
        Ok(this)
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: created by `new`.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}

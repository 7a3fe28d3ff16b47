//! Safetensors files, read by position and written in place: for Hugging Face folders and checkpoints.
//!
//! Nothing is mapped into memory: a file that shrinks under a reader is an error, not a signal.

mod append;
mod convert;
mod header;
mod read;
#[cfg(test)]
mod tests;
mod write;

pub(crate) use append::TensorFileAppender;
pub(crate) use convert::{encode, f32_to_bf16, f32_to_f16, to_f32, to_f64};
pub(crate) use read::TensorFile;
pub(crate) use write::TensorFileWriter;
use write::{header, padded};

use std::path::Path;

use safetensors::Dtype;

use crate::{DType, Error, ErrorKind};

#[cfg(target_endian = "big")]
compile_error!("safetensors data is little-endian and is read without swapping bytes");

/// Our name for an element type; `None` for those no model of ours stores.
fn dtype_of(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F64 => DType::F64,
        Dtype::F32 => DType::F32,
        Dtype::BF16 => DType::Bf16,
        Dtype::F16 => DType::F16,
        Dtype::I64 => DType::I64,
        Dtype::I32 => DType::I32,
        Dtype::U8 => DType::U8,
        _ => return None,
    })
}

/// A file that cannot be read or is damaged.
fn damaged(path: &Path, message: impl Into<String>) -> Error {
    Error::new(ErrorKind::File, "read_safetensors", message)
        .with("file", path.display())
        .help("the file is incomplete or damaged: copy or download it again")
}

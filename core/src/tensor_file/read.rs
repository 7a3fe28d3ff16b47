//! Reads tensors of one file by position.

use std::{
    fs::File,
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use indexmap::IndexMap;

use super::{damaged, dtype_of, header::Header};
use crate::{DType, Error, ErrorKind, Result, files::open_regular};

/// As the safetensors library; a longer header is hostile.
const MAX_HEADER: u64 = 100_000_000;

/// An open file whose header has been checked against its length.
#[derive(Debug)]
pub(crate) struct TensorFile {
    path: PathBuf,
    file: File,
    tensors: IndexMap<String, Entry>,
}

/// Where a tensor is.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    /// Position of its first byte in the file.
    start: u64,
    /// Bytes it takes.
    len: usize,
}

impl TensorFile {
    /// Opens a file and checks its whole structure.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let file = open_regular(path).map_err(|e| {
            Error::new(ErrorKind::File, "read_safetensors", "cannot open the file")
                .with("file", path.display())
                .caused_by(e)
        })?;
        let io = |e| damaged(path, "cannot read the file").caused_by(e);
        let metadata = file.metadata().map_err(io)?;
        let file_len = metadata.len();
        if file_len < 8 {
            let message = format!("a safetensors file has at least 8 bytes, this one {file_len}");
            return Err(damaged(path, message));
        }
        let mut prefix = [0; 8];
        file.read_exact_at(&mut prefix, 0).map_err(io)?;
        let header_len = u64::from_le_bytes(prefix);
        if header_len > (file_len - 8).min(MAX_HEADER) {
            return Err(damaged(path, "the header does not fit in the file")
                .with("found", format!("a header of {header_len} bytes"))
                .with(
                    "expected",
                    format!("at most {} bytes", (file_len - 8).min(MAX_HEADER)),
                ));
        }
        let mut json = vec![0; header_len as usize];
        file.read_exact_at(&mut json, 8).map_err(io)?;
        let header = Header::parse(&json).map_err(|message| damaged(path, message))?;
        let expected = header.data_len as u64 + 8 + header_len;
        if expected != file_len {
            return Err(
                damaged(path, "the file's length is not what its header says")
                    .with("expected", format!("{expected} bytes"))
                    .with("found", format!("{file_len} bytes")),
            );
        }
        let mut tensors = IndexMap::new();
        for (name, info) in header.tensors {
            let Some(dtype) = dtype_of(info.dtype) else {
                let message = "the element type of a tensor is not supported";
                return Err(
                    Error::new(ErrorKind::Unsupported, "read_safetensors", message)
                        .with("file", path.display())
                        .with("tensor", name)
                        .with("found", info.dtype)
                        .with("supported", "F64, F32, BF16, F16, I64, I32, U8"),
                );
            };
            let (start, end) = info.data_offsets;
            let entry = Entry {
                dtype,
                shape: info.shape,
                start: 8 + header_len + start as u64,
                len: end - start,
            };
            tensors.insert(name, entry);
        }
        Ok(Self {
            path: path.to_owned(),
            file,
            tensors,
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Tensors in the order of their data.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.tensors
            .iter()
            .map(|(name, entry)| (name.as_str(), entry))
    }

    pub(crate) fn entry(&self, name: &str) -> Option<&Entry> {
        self.tensors.get(name)
    }

    /// Fills `bytes` from a tensor's data, `offset` bytes into it.
    pub(crate) fn read_at(&self, name: &str, offset: usize, bytes: &mut [u8]) -> Result<()> {
        let end = offset.checked_add(bytes.len());
        let entry = self
            .entry(name)
            .filter(|entry| end.is_some_and(|end| end <= entry.len));
        let Some(entry) = entry else {
            let message = "no such part of a tensor in the file";
            return Err(Error::new(ErrorKind::Defect, "read_safetensors", message)
                .with("file", self.path.display())
                .with("tensor", name));
        };
        self.file
            .read_exact_at(bytes, entry.start + offset as u64)
            .map_err(|e| {
                damaged(&self.path, "cannot read a tensor's data")
                    .with("tensor", name)
                    .caused_by(e)
            })
    }

    /// A range of a tensor's elements as f32: exact but from f64, which is rounded.
    pub(crate) fn read_f32(&self, name: &str, elements: Range<usize>) -> Result<Vec<f32>> {
        self.read_as(name, elements, super::to_f32)
    }

    /// A range of a tensor's elements as f64: exact.
    pub(crate) fn read_f64(&self, name: &str, elements: Range<usize>) -> Result<Vec<f64>> {
        self.read_as(name, elements, super::to_f64)
    }

    fn read_as<T>(
        &self,
        name: &str,
        elements: Range<usize>,
        convert: impl Fn(DType, &[u8], &mut Vec<T>),
    ) -> Result<Vec<T>> {
        // Bounds what is held beside the result.
        const CHUNK: usize = 1 << 20;
        let dtype = self.entry(name).map_or(DType::U8, |entry| entry.dtype);
        let mut values = Vec::with_capacity(elements.len());
        let mut bytes = vec![0; elements.len().min(CHUNK) * dtype.size()];
        for start in elements.clone().step_by(CHUNK) {
            let len = CHUNK.min(elements.end - start) * dtype.size();
            self.read_at(name, start * dtype.size(), &mut bytes[..len])?;
            convert(dtype, &bytes[..len], &mut values);
        }
        Ok(values)
    }
}

//! Writes tensors of one file in place: the header first, then data in any order.

use std::{
    fs::File,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use indexmap::IndexMap;
use serde_json::{Map, Value, json};

use crate::{DType, Error, ErrorKind, Result, staged_folder::cannot_write};

/// A file being written, whose tensors were all announced.
#[derive(Debug)]
pub(crate) struct TensorFileWriter {
    path: PathBuf,
    file: File,
    /// Start and end of each tensor in the file.
    places: IndexMap<String, (u64, u64)>,
}

impl TensorFileWriter {
    /// Creates a file (that must not exist) and writes its header.
    pub(crate) fn create(path: &Path, tensors: &[(&str, DType, &[usize])]) -> Result<Self> {
        let (json, mut places) = header(tensors);
        let header = padded(&json, 0);
        for (start, end) in places.values_mut() {
            *start += header.len() as u64;
            *end += header.len() as u64;
        }
        let file = File::create_new(path).map_err(|e| cannot_write(path, e))?;
        file.write_all_at(&header, 0)
            .map_err(|e| cannot_write(path, e))?;
        Ok(Self {
            path: path.to_owned(),
            file,
            places,
        })
    }

    /// Writes bytes of a tensor, `offset` bytes into it.
    pub(crate) fn write_at(&self, name: &str, offset: usize, bytes: &[u8]) -> Result<()> {
        let place = self
            .places
            .get(name)
            .map(|&(start, end)| (start + offset as u64, end));
        match place.filter(|(start, end)| start + bytes.len() as u64 <= *end) {
            Some((start, _)) => {
                (self.file.write_all_at(bytes, start)).map_err(|e| cannot_write(&self.path, e))
            }
            None => Err(Error::new(
                ErrorKind::Defect,
                "write_safetensors",
                "no such part of a tensor was announced",
            )
            .with("file", self.path.display())
            .with("tensor", name)),
        }
    }

    /// Makes the file durable.
    pub(crate) fn finish(self) -> Result<()> {
        self.file
            .sync_all()
            .map_err(|e| cannot_write(&self.path, e))
    }
}

/// The header's JSON, and each tensor's place in the data. `format=pt` is what `transformers` asks for.
pub(crate) fn header(
    tensors: &[(&str, DType, &[usize])],
) -> (String, IndexMap<String, (u64, u64)>) {
    let mut json = Map::new();
    json.insert("__metadata__".to_owned(), json!({"format": "pt"}));
    let mut places = IndexMap::new();
    let mut end = 0u64;
    for &(name, dtype, shape) in tensors {
        let start = end;
        end += (shape.iter().product::<usize>() * dtype.size()) as u64;
        let dtype = match dtype {
            DType::F64 => "F64",
            DType::F32 => "F32",
            DType::Bf16 => "BF16",
            DType::F16 => "F16",
            DType::I64 => "I64",
            DType::I32 => "I32",
            DType::U8 => "U8",
        };
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]});
        json.insert(name.to_owned(), entry);
        places.insert(name.to_owned(), (start, end));
    }
    (Value::Object(json).to_string(), places)
}

/// The bytes before the data, at least `room` of them (a multiple of 8): length, JSON, and spaces so that data
/// starts at a multiple of 8 and may be mapped and read in place.
pub(crate) fn padded(json: &str, room: usize) -> Vec<u8> {
    let len = (8 + json.len()).next_multiple_of(8).max(room);
    let mut bytes = ((len - 8) as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(json.as_bytes());
    bytes.resize(len, b' ');
    bytes
}

//! What a folder's files hold, whatever its config says.

use std::path::{Path, PathBuf};

use indexmap::IndexMap;

use super::folder::open_files;
use crate::{DType, Error, ErrorKind, Result, tensor_file::TensorFile};

/// The tensors of a Hugging Face folder, held against its index but not against a model.
#[derive(Debug)]
pub struct HfContents {
    files: Vec<TensorFile>,
    tensors: IndexMap<String, usize>,
}

/// One of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HfTensor<'a> {
    /// Its name.
    pub name: &'a str,
    /// The file it is in.
    pub file: &'a Path,
    /// Its element type.
    pub dtype: DType,
    /// Its shape.
    pub shape: &'a [usize],
}

impl HfContents {
    /// Opens every file and checks its structure.
    ///
    /// # Errors
    /// `File` naming the folder or file, and the tensor at fault; `Unsupported` for element types.
    pub fn open(folder: &Path) -> Result<Self> {
        let (files, tensors) = open_files(folder)?;
        Ok(Self { files, tensors })
    }

    /// The files.
    pub fn files(&self) -> impl Iterator<Item = PathBuf> {
        self.files.iter().map(|file| file.path().to_owned())
    }

    /// The tensors, file by file.
    pub fn tensors(&self) -> impl Iterator<Item = HfTensor<'_>> {
        self.tensors.iter().filter_map(|(name, &file)| {
            let file = &self.files[file];
            let entry = file.entry(name)?;
            Some(HfTensor {
                name,
                file: file.path(),
                dtype: entry.dtype,
                shape: &entry.shape,
            })
        })
    }

    /// Reads every value. These files have no checksums: what can be found is what cannot be read, and what is no
    /// number.
    ///
    /// # Errors
    /// `File` naming the file and the tensor.
    pub fn verify(&self) -> Result<()> {
        const CHUNK: usize = 1 << 20;
        for tensor in self.tensors() {
            let file = &self.files[self.tensors[tensor.name]];
            let elements: usize = tensor.shape.iter().product();
            for start in (0..elements).step_by(CHUNK) {
                let values = file.read_f64(tensor.name, start..elements.min(start + CHUNK))?;
                if let Some(at) = values.iter().position(|value| !value.is_finite()) {
                    let message = "a value is not finite";
                    return Err(Error::new(ErrorKind::File, "verify_weights", message)
                        .with("file", tensor.file.display())
                        .with("tensor", tensor.name)
                        .with("element", start + at)
                        .with("found", values[at])
                        .help("the file is damaged, or the training that wrote it diverged"));
                }
            }
        }
        Ok(())
    }
}

//! Weights of a Hugging Face folder, checked against the model before any is read.

use std::{
    ops::Range,
    path::{Path, PathBuf},
};

use indexmap::IndexMap;

use super::{SINGLE_FILE, index::Index};
use crate::{
    DType, Error, ErrorKind, Result,
    model::{ModelSpec, ParameterSpec},
    tensor_file::TensorFile,
    weights::{WeightSource, check_runs},
};

/// Buffers that old checkpoints carry and that follow from the config.
const DERIVED: [&str; 3] = [
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
];
const HEAD: &str = "lm_head.weight";
const EMBEDDING: &str = "model.embed_tokens.weight";

/// The weights of a folder that `save_pretrained` or an [`HfWriter`](super::HfWriter) wrote: one
/// `model.safetensors`, or shards with an index. f64, f32, bf16 and f16 are read.
///
/// Tensors are read by position when asked for, so an open folder takes no memory for weights.
#[derive(Debug)]
pub struct HfFolder {
    folder: PathBuf,
    files: Vec<TensorFile>,
    /// The model's parameters in order, and the file each is in.
    tensors: IndexMap<String, usize>,
}

impl HfFolder {
    /// Opens every file and checks every tensor: each of the model's parameters is there once, with its shape,
    /// and nothing else is. Two things beyond the model are tolerated: RoPE's buffers, which follow from the
    /// config, and a `lm_head.weight` beside a tied embedding if both are equal byte for byte.
    ///
    /// # Errors
    /// `File` naming the folder or file, and every tensor at fault; `Unsupported` for element types.
    pub fn open(folder: &Path, model: &ModelSpec) -> Result<Self> {
        let (files, tensors) = open_files(folder)?;
        let folder = Self {
            folder: folder.to_owned(),
            files,
            tensors,
        };
        folder.check_model(model)
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    fn check_model(mut self, model: &ModelSpec) -> Result<Self> {
        let parameters = model.parameters();
        let mut faults = Faults::default();
        let mut tensors = IndexMap::new();
        for parameter in &parameters {
            match self.tensors.shift_remove_full(&parameter.name) {
                None => faults.missing.push(parameter.name.clone()),
                Some((_, name, file)) => {
                    faults.check(parameter, &self.files[file]);
                    tensors.insert(name, file);
                }
            }
        }
        let rest = std::mem::replace(&mut self.tensors, tensors);
        for (name, file) in rest {
            let known = DERIVED.iter().any(|buffer| name.ends_with(buffer));
            let tied_head = model.tied_embeddings && name == HEAD;
            match self.tensors.get(EMBEDDING) {
                _ if known => {}
                Some(&embedding) if tied_head => {
                    if !same_bytes(
                        (&self.files[embedding], EMBEDDING),
                        (&self.files[file], HEAD),
                    )? {
                        let path = self.files[file].path().display();
                        faults.untied.push(format!("{HEAD} ({path})"));
                    }
                }
                _ => {
                    let path = self.files[file].path().display();
                    faults.unexpected.push(format!("{name} ({path})"));
                }
            }
        }
        faults.into_result(&self.folder)?;
        Ok(self)
    }

    fn file(&self, name: &str) -> Result<&TensorFile> {
        match self.tensors.get(name) {
            Some(&file) => Ok(&self.files[file]),
            None => Err(Error::new(
                ErrorKind::File,
                "read_weights",
                "the folder has no such tensor",
            )
            .with("file", self.folder.display())
            .with("tensor", name)),
        }
    }
}

impl WeightSource for HfFolder {
    fn names(&self) -> Vec<String> {
        self.tensors.keys().cloned().collect()
    }

    fn describe(&self, name: &str) -> Result<(Vec<usize>, DType)> {
        let file = self.file(name)?;
        let entry = file
            .entry(name)
            .expect("the file was chosen because it has the tensor");
        Ok((entry.shape.clone(), entry.dtype))
    }

    fn read_runs(&self, name: &str, runs: &[Range<usize>]) -> Result<Vec<f32>> {
        let (shape, _) = self.describe(name)?;
        let num_elements = check_runs(name, runs, shape.iter().product())?;
        let file = self.file(name)?;
        let mut values = Vec::with_capacity(num_elements);
        let mut next = runs;
        while !next.is_empty() {
            let (near, behind) = next.split_at(neighbours(next));
            let span = near[0].start..near[near.len() - 1].end;
            let read = file.read_f32(name, span.clone())?;
            for run in near {
                values.extend_from_slice(&read[run.start - span.start..run.end - span.start]);
            }
            next = behind;
        }
        Ok(values)
    }

    fn read_f64(&self, name: &str) -> Result<Vec<f64>> {
        let (shape, _) = self.describe(name)?;
        self.file(name)?.read_f64(name, 0..shape.iter().product())
    }
}

/// How many of the first runs are read at once: they go upwards, with gaps of less than a page or two between them, and
/// all of them are a few megabytes. A rank's part of a matrix that is split by columns is a short run a row.
fn neighbours(runs: &[Range<usize>]) -> usize {
    const GAP: usize = 1 << 12;
    const MOST: usize = 1 << 20;
    let start = runs[0].start;
    let near = |pair: &[Range<usize>]| {
        let gap = pair[1].start.checked_sub(pair[0].end);
        gap.is_some_and(|gap| gap <= GAP) && pair[1].end - start <= MOST
    };
    1 + runs.windows(2).take_while(|pair| near(pair)).count()
}

/// The files of a folder, and each tensor's; the index, where there is one, says the same.
pub(super) fn open_files(folder: &Path) -> Result<(Vec<TensorFile>, IndexMap<String, usize>)> {
    let index = Index::read(folder)?;
    let names = index.as_ref().map_or(vec![SINGLE_FILE], Index::files);
    let files = (names.iter())
        .map(|name| TensorFile::open(&folder.join(name)))
        .collect::<Result<Vec<_>>>()?;
    let found = locate(&files)?;
    if let Some(index) = &index {
        check_index(folder, index, &names, &found)?;
    }
    Ok((files, found))
}

/// Every tensor of every file, and the file's number.
fn locate(files: &[TensorFile]) -> Result<IndexMap<String, usize>> {
    let mut found: IndexMap<String, usize> = IndexMap::new();
    for (number, file) in files.iter().enumerate() {
        for (name, _) in file.tensors() {
            if let Some(first) = found.insert(name.to_owned(), number) {
                let message = "a tensor is in two shards";
                return Err(Error::new(ErrorKind::File, "read_weights", message)
                    .with("file", file.path().display())
                    .with("other file", files[first].path().display())
                    .with("tensor", name));
            }
        }
    }
    Ok(found)
}

/// Each tensor is in the shard that the index says.
fn check_index(
    folder: &Path,
    index: &Index,
    names: &[&str],
    found: &IndexMap<String, usize>,
) -> Result<()> {
    let wrong: Vec<String> = (index.iter())
        .filter(|(tensor, file)| {
            found
                .get(*tensor)
                .is_none_or(|&number| names[number] != *file)
        })
        .map(|(tensor, file)| format!("{tensor} ({})", folder.join(file).display()))
        .collect();
    if wrong.is_empty() {
        return Ok(());
    }
    let message = "shards lack tensors that the index says they hold";
    Err(Error::new(ErrorKind::File, "read_weights", message)
        .with("file", folder.join(super::INDEX_FILE).display())
        .with("missing", wrong.join(", "))
        .help("the shards and the index are of different checkpoints: copy or download them again"))
}

fn same_bytes(a: (&TensorFile, &str), b: (&TensorFile, &str)) -> Result<bool> {
    const CHUNK: usize = 1 << 22;
    let (Some(left), Some(right)) = (a.0.entry(a.1), b.0.entry(b.1)) else {
        return Ok(false);
    };
    if left.dtype != right.dtype || left.shape != right.shape {
        return Ok(false);
    }
    let len = left.shape.iter().product::<usize>() * left.dtype.size();
    let (mut x, mut y) = (vec![0; len.min(CHUNK)], vec![0; len.min(CHUNK)]);
    for start in (0..len).step_by(CHUNK) {
        let n = CHUNK.min(len - start);
        a.0.read_at(a.1, start, &mut x[..n])?;
        b.0.read_at(b.1, start, &mut y[..n])?;
        if x[..n] != y[..n] {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Every tensor at fault.
#[derive(Default)]
struct Faults {
    missing: Vec<String>,
    unexpected: Vec<String>,
    untied: Vec<String>,
    shapes: Vec<String>,
    dtypes: Vec<String>,
}

impl Faults {
    fn check(&mut self, parameter: &ParameterSpec, file: &TensorFile) {
        let ParameterSpec { name, shape, .. } = parameter;
        let Some(entry) = file.entry(name) else {
            return;
        };
        let path = file.path().display();
        if entry.shape != *shape {
            let found = &entry.shape;
            self.shapes.push(format!(
                "{name}: found {found:?}, expected {shape:?} ({path})"
            ));
        }
        if !matches!(
            entry.dtype,
            DType::F64 | DType::F32 | DType::Bf16 | DType::F16
        ) {
            self.dtypes
                .push(format!("{name}: found {} ({path})", entry.dtype));
        }
    }

    fn into_result(self, folder: &Path) -> Result<()> {
        let message = "the folder's tensors are not those of its config.json";
        let mut error =
            Error::new(ErrorKind::File, "read_weights", message).with("file", folder.display());
        let mut any = false;
        for (key, tensors) in [
            ("missing tensors", self.missing),
            ("unexpected tensors", self.unexpected),
            ("tied embedding, but another head", self.untied),
            ("wrong shapes", self.shapes),
            ("element types other than f64, f32, bf16, f16", self.dtypes),
        ] {
            if !tensors.is_empty() {
                any = true;
                error = error.with(key, tensors.join(", "));
            }
        }
        if any { Err(error) } else { Ok(()) }
    }
}

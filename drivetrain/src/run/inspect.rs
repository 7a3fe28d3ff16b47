//! What a checkpoint, a folder of checkpoints or a Hugging Face folder holds.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use drivetrain_core::{
    DType, Error, ErrorKind, Result,
    checkpoint::{Checkpoint, CheckpointStore, Identity, StateReader, StateSlot},
    hf::HfContents,
};
use serde::Serialize;
use serde_json::Value;

/// What was found in a folder.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Contents {
    /// A checkpoint.
    Checkpoint(CheckpointContents),
    /// A folder of checkpoints.
    Store(StoreContents),
    /// A Hugging Face folder.
    Model(ModelContents),
}

/// A folder of checkpoints.
#[derive(Debug, Clone, Serialize)]
pub struct StoreContents {
    /// The folder.
    pub folder: PathBuf,
    /// Steps of the complete checkpoints, in order.
    pub steps: Vec<u64>,
    /// Folders that look like checkpoints and are none, and why.
    pub incomplete: Vec<(PathBuf, String)>,
    /// The one that a run would go on from, if there is one.
    pub newest: Option<CheckpointContents>,
}

/// A checkpoint.
#[derive(Debug, Clone, Serialize)]
pub struct CheckpointContents {
    /// The folder.
    pub folder: PathBuf,
    /// The optimizer step after which it was saved.
    pub step: u64,
    /// Number of ranks that wrote it.
    pub world_size: usize,
    /// Whose it is, and the engine that wrote it.
    pub identity: Identity,
    /// What it holds beside tensors: step, data position, layout.
    pub blobs: BTreeMap<String, Value>,
    /// A file a rank.
    pub files: Vec<FileContents>,
    /// Every tensor that was saved.
    pub tensors: Vec<TensorContents>,
    /// Whether every checksum was found right; `None` where nobody looked.
    pub verified: Option<bool>,
}

/// A file of tensors.
#[derive(Debug, Clone, Serialize)]
pub struct FileContents {
    /// Its name in the folder.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// Tensors, or pieces of them, in it.
    pub pieces: usize,
}

/// A tensor.
#[derive(Debug, Clone, Serialize)]
pub struct TensorContents {
    /// Its parameter.
    pub name: String,
    /// What it is to its parameter; of a model, its weight.
    pub slot: StateSlot,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its element type.
    pub dtype: DType,
    /// Where its elements are.
    pub pieces: Vec<PieceContents>,
}

/// A part of a tensor.
#[derive(Debug, Clone, Serialize)]
pub struct PieceContents {
    /// The file it is in.
    pub file: String,
    /// Number of elements.
    pub elements: usize,
    /// Number of runs of the flattened tensor that they are.
    pub runs: usize,
    /// The first of these elements in the flattened tensor.
    pub first: usize,
    /// XXH3 of its bytes, where the file's format has one.
    pub checksum: Option<String>,
}

/// A Hugging Face folder.
#[derive(Debug, Clone, Serialize)]
pub struct ModelContents {
    /// The folder.
    pub folder: PathBuf,
    /// Its files of weights.
    pub files: Vec<FileContents>,
    /// Its tensors.
    pub tensors: Vec<TensorContents>,
    /// Whether every value was found readable and finite; `None` where nobody looked.
    pub verified: Option<bool>,
}

impl TensorContents {
    /// Bytes of its elements.
    pub fn num_bytes(&self) -> u64 {
        (self.shape.iter().product::<usize>() * self.dtype.size()) as u64
    }
}

/// Looks into a folder; with `verify` also at every value, held against its checksum where there is one.
///
/// # Errors
/// `File` and `Checkpoint` naming what is missing or damaged; `File` for a folder that is none of these.
pub fn inspect(folder: &Path, verify: bool) -> Result<Contents> {
    let fault = |message: &str| {
        Error::new(ErrorKind::File, "inspect", message).with("folder", folder.display())
    };
    if !folder.is_dir() {
        return Err(fault(match folder.exists() {
            true => "not a folder",
            false => "there is no such folder",
        })
        .help("give a checkpoint (step-...), a folder of checkpoints, or a Hugging Face folder"));
    }
    if folder.join("manifest.json").exists() {
        return checkpoint(folder, verify).map(Contents::Checkpoint);
    }
    let weights = ["model.safetensors", "model.safetensors.index.json"];
    if weights.iter().any(|name| folder.join(name).exists()) {
        return model(folder, verify).map(Contents::Model);
    }
    let store = CheckpointStore::new(folder);
    let scan = store.scan()?;
    if scan.complete.is_empty() && scan.incomplete.is_empty() {
        let help = match folder.join("checkpoints").is_dir() {
            true => "this is a run's output: give its `checkpoints` or its `model`",
            false => {
                "give a checkpoint (step-...), a folder of checkpoints, or a Hugging Face folder"
            }
        };
        return Err(fault("the folder holds no checkpoint and no model")
            .with(
                "expected",
                format!("manifest.json, step-..., or {}", weights.join(" or ")),
            )
            .help(help));
    }
    let newest = scan.complete.last_key_value();
    Ok(Contents::Store(StoreContents {
        folder: folder.to_owned(),
        newest: newest
            .map(|(_, path)| checkpoint(path, verify))
            .transpose()?,
        steps: scan.complete.into_keys().collect(),
        incomplete: (scan.incomplete.into_iter())
            .map(|(path, error)| (path, error.to_string()))
            .collect(),
    }))
}

fn checkpoint(folder: &Path, verify: bool) -> Result<CheckpointContents> {
    let found = Checkpoint::open(folder)?;
    if verify {
        found.verify()?;
    }
    let tensors = found.tensors().map(|(name, slot)| {
        let pieces = found.pieces(name, slot)?;
        Ok(TensorContents {
            name: name.to_owned(),
            slot,
            shape: found.shape(name, slot).unwrap_or_default(),
            dtype: pieces.first().map_or(DType::F32, |piece| piece.dtype),
            pieces: (pieces.into_iter())
                .map(|piece| PieceContents {
                    file: piece.file.to_owned(),
                    elements: piece.elements,
                    runs: piece.runs,
                    first: piece.first,
                    checksum: Some(piece.checksum.to_owned()),
                })
                .collect(),
        })
    });
    let files = found.files().map(|file| FileContents {
        name: file.name.to_owned(),
        bytes: file.bytes,
        pieces: file.pieces,
    });
    let blobs = found.blobs();
    Ok(CheckpointContents {
        folder: folder.to_owned(),
        step: found.step(),
        world_size: found.world_size(),
        identity: found.identity().clone(),
        blobs: blobs
            .map(|(name, value)| (name.to_owned(), value.clone()))
            .collect(),
        files: files.collect(),
        tensors: tensors.collect::<Result<_>>()?,
        verified: verify.then_some(true),
    })
}

fn model(folder: &Path, verify: bool) -> Result<ModelContents> {
    let found = HfContents::open(folder)?;
    if verify {
        found.verify()?;
    }
    let name = |path: &Path| {
        path.file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned()
    };
    let tensors: Vec<_> = found
        .tensors()
        .map(|tensor| TensorContents {
            name: tensor.name.to_owned(),
            slot: StateSlot::Weight,
            shape: tensor.shape.to_vec(),
            dtype: tensor.dtype,
            pieces: vec![PieceContents {
                file: name(tensor.file),
                elements: tensor.shape.iter().product(),
                runs: 1,
                first: 0,
                checksum: None,
            }],
        })
        .collect();
    let files = found.files().map(|path| {
        let name = name(&path);
        let bytes = std::fs::metadata(&path).map_or(0, |meta| meta.len());
        let pieces = tensors.iter().filter(|t| t.pieces[0].file == name).count();
        FileContents {
            name,
            bytes,
            pieces,
        }
    });
    Ok(ModelContents {
        folder: folder.to_owned(),
        files: files.collect(),
        tensors,
        verified: verify.then_some(true),
    })
}

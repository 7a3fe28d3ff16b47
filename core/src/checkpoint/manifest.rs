//! `manifest.json`: what a checkpoint holds and where, written last.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use super::{Identity, StateSlot, runs, runs::Strided};
use crate::{DType, Error, ErrorKind, Result, files::read_text};

pub(super) const MANIFEST: &str = "manifest.json";
const FORMAT: &str = "drivetrain-checkpoint";
const VERSION: u32 = 1;
const MAX_MANIFEST_BYTES: u64 = 4 << 30;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Manifest {
    pub(super) format: String,
    pub(super) version: u32,
    pub(super) step: u64,
    pub(super) world_size: usize,
    pub(super) identity: Identity,
    /// Rank files in rank order.
    pub(super) files: Vec<FileRecord>,
    pub(super) blobs: BTreeMap<String, Value>,
    /// XXH3 of this manifest with an empty checksum.
    checksum: String,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct FileRecord {
    pub(super) name: String,
    pub(super) bytes: u64,
    pub(super) pieces: Vec<PieceRecord>,
}

/// A piece: a 1-D tensor of a rank file, and where its elements lie in the global tensor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct PieceRecord {
    /// Its name in the file.
    pub(super) key: String,
    pub(super) name: String,
    pub(super) slot: StateSlot,
    pub(super) shape: Vec<usize>,
    pub(super) dtype: DType,
    pub(super) runs: Vec<Strided>,
    /// XXH3 of the data, in hexadecimal.
    pub(super) checksum: String,
}

/// A saved tensor: its shape, and the pieces (file, piece) it is in.
#[derive(Debug)]
pub(super) struct SavedTensor {
    pub(super) shape: Vec<usize>,
    pub(super) pieces: Vec<(usize, usize)>,
}

pub(super) type Tensors = BTreeMap<(String, StateSlot), SavedTensor>;

impl Manifest {
    pub(super) fn new(
        step: u64,
        identity: Identity,
        files: Vec<FileRecord>,
        blobs: BTreeMap<String, Value>,
    ) -> Self {
        Self {
            format: FORMAT.to_owned(),
            version: VERSION,
            step,
            world_size: files.len(),
            identity,
            files,
            blobs,
            checksum: String::new(),
        }
    }

    /// The file's text, with its checksum.
    pub(super) fn to_json(&self) -> Result<String> {
        let mut sealed = self.clone();
        sealed.checksum = self.sum()?;
        serde_json::to_string(&sealed).map_err(not_json)
    }

    /// Reads the manifest of a folder and checks that all its files are there.
    ///
    /// # Errors
    /// `Checkpoint` for another format, `File` for what is missing or damaged.
    pub(super) fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(MANIFEST);
        let damaged = |message: &str| {
            Error::new(ErrorKind::File, "open_checkpoint", message).with("file", path.display())
        };
        let text = read_text(&path, MAX_MANIFEST_BYTES)
            .map_err(|e| damaged("cannot read the manifest").caused_by(e))?;
        let value: Value = serde_json::from_str(&text)
            .map_err(|e| damaged("the manifest is incomplete or malformed").caused_by(e))?;
        let (format, version) = (value["format"].as_str(), value["version"].as_u64());
        if format != Some(FORMAT) || version != Some(VERSION.into()) {
            let message = "the checkpoint has a format that this version does not read";
            return Err(
                Error::new(ErrorKind::Checkpoint, "open_checkpoint", message)
                    .with("file", path.display())
                    .with(
                        "found",
                        format!("{} version {}", value["format"], value["version"]),
                    )
                    .with("expected", format!("\"{FORMAT}\" version {VERSION}")),
            );
        }
        let manifest: Self = serde_json::from_value(value)
            .map_err(|e| damaged("the manifest is malformed").caused_by(e))?;
        if manifest.checksum != manifest.sum()? {
            return Err(damaged(
                "the manifest's checksum is wrong: it was changed after it was written",
            ));
        }
        for file in &manifest.files {
            let path = folder.join(&file.name);
            let found = fs::metadata(&path).map_err(|e| {
                Error::new(
                    ErrorKind::File,
                    "open_checkpoint",
                    "a file of the checkpoint is missing",
                )
                .with("file", path.display())
                .caused_by(e)
            })?;
            if found.len() != file.bytes {
                let message = "a file of the checkpoint is incomplete";
                return Err(Error::new(ErrorKind::File, "open_checkpoint", message)
                    .with("file", path.display())
                    .with("found", format!("{} bytes", found.len()))
                    .with("expected", format!("{} bytes", file.bytes)));
            }
        }
        Ok(manifest)
    }

    fn sum(&self) -> Result<String> {
        let mut open = self.clone();
        open.checksum.clear();
        let text = serde_json::to_string(&open).map_err(not_json)?;
        Ok(checksum(text.as_bytes()))
    }

    /// The saved tensors, each of whose elements is in exactly one piece.
    ///
    /// # Errors
    /// `Checkpoint` naming the tensor whose pieces overlap, leave elements out, or disagree.
    pub(super) fn tensors(&self) -> Result<Tensors> {
        let mut tensors = Tensors::new();
        for (i, file) in self.files.iter().enumerate() {
            for (j, piece) in file.pieces.iter().enumerate() {
                let tensor = tensors
                    .entry((piece.name.clone(), piece.slot))
                    .or_insert_with(|| SavedTensor {
                        shape: piece.shape.clone(),
                        pieces: Vec::new(),
                    });
                if tensor.shape != piece.shape {
                    let found = format!(
                        "{:?} in {}, {:?} before",
                        piece.shape, file.name, tensor.shape
                    );
                    return Err(self.fault(
                        "pieces disagree about the tensor's shape",
                        piece,
                        found,
                    ));
                }
                tensor.pieces.push((i, j));
            }
        }
        for tensor in tensors.values() {
            self.check_cover(tensor)?;
        }
        Ok(tensors)
    }

    pub(super) fn piece(&self, (file, piece): (usize, usize)) -> &PieceRecord {
        &self.files[file].pieces[piece]
    }

    fn check_cover(&self, tensor: &SavedTensor) -> Result<()> {
        let first = self.piece(tensor.pieces[0]);
        let elements = (tensor.shape.iter()).try_fold(1usize, |n, &dim| n.checked_mul(dim));
        let Some(elements) = elements else {
            return Err(self.fault("the shape is absurd", first, format!("{:?}", tensor.shape)));
        };
        let mut covered: Vec<(usize, usize, PathBuf)> = Vec::new();
        for &(file, piece) in &tensor.pieces {
            let record = self.piece((file, piece));
            if runs::num_elements(&record.runs, elements).is_none() {
                let found = format!("{:?}", record.runs);
                return Err(self.fault("a piece lies outside of its tensor", record, found));
            }
            let name = Path::new(&self.files[file].name);
            let parts = runs::expand(&record.runs).map(|r| (r.start, r.end, name.to_owned()));
            covered.extend(parts);
        }
        covered.sort();
        let mut end = 0;
        let last = (elements, elements, PathBuf::new());
        for (start, stop, file) in covered.iter().chain([&last]) {
            if *start > end {
                let found = format!("nothing for elements {end}..{start} of {elements}");
                return Err(self.fault("elements of a tensor are missing", first, found));
            }
            if *start < end && file != &last.2 {
                let found = format!(
                    "elements {start}..{} again in {}",
                    end.min(*stop),
                    file.display()
                );
                return Err(self.fault("pieces of a tensor overlap", first, found));
            }
            end = *stop;
        }
        Ok(())
    }

    fn fault(&self, message: &str, piece: &PieceRecord, found: String) -> Error {
        Error::new(ErrorKind::Checkpoint, "open_checkpoint", message)
            .with("step", self.step)
            .with("tensor", &piece.name)
            .with("slot", format!("{:?}", piece.slot))
            .with("found", found)
    }
}

pub(super) fn checksum(bytes: &[u8]) -> String {
    format!("{:016x}", xxh3_64(bytes))
}

fn not_json(cause: serde_json::Error) -> Error {
    Error::new(
        ErrorKind::Defect,
        "write_checkpoint",
        "the manifest is not JSON",
    )
    .caused_by(cause)
}

//! A complete checkpoint, read by global coordinates from the pieces of however many ranks wrote it.

use std::{
    ops::Range,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use serde_json::Value;
use xxhash_rust::xxh3::Xxh3;

use super::{
    Identity, StateReader, StateSlot,
    manifest::{Manifest, SavedTensor, Tensors},
    runs,
};
use crate::{DType, Error, ErrorKind, Result, tensor_file::TensorFile};

/// A complete checkpoint. Opening it checks its structure; a piece's checksum is checked when it is first read.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    manifest: Manifest,
    tensors: Tensors,
    files: Vec<TensorFile>,
    /// A flag a piece: whether its checksum was found right.
    verified: Vec<Vec<Mutex<bool>>>,
}

impl Checkpoint {
    /// Opens the checkpoint in this folder.
    ///
    /// # Errors
    /// `File` for missing, cut or damaged files; `Checkpoint` for another format, and for tensors whose pieces
    /// overlap or leave elements out.
    pub fn open(folder: &Path) -> Result<Self> {
        let manifest = Manifest::read(folder)?;
        let tensors = manifest.tensors()?;
        let files = (manifest.files.iter())
            .map(|file| TensorFile::open(&folder.join(&file.name)))
            .collect::<Result<Vec<_>>>()?;
        for (file, record) in files.iter().zip(&manifest.files) {
            for piece in &record.pieces {
                let limit = piece.shape.iter().product();
                let count = runs::num_elements(&piece.runs, limit);
                let entry = file.entry(&piece.key);
                let fits = entry.is_some_and(|entry| {
                    entry.dtype == piece.dtype
                        && entry.shape.len() == 1
                        && count == Some(entry.shape[0])
                });
                if !fits {
                    let message = "a file of the checkpoint does not hold what the manifest says";
                    return Err(Error::new(ErrorKind::File, "open_checkpoint", message)
                        .with("file", file.path().display())
                        .with("tensor", &piece.key));
                }
            }
        }
        let flags = |n| std::iter::repeat_with(Mutex::default).take(n).collect();
        Ok(Self {
            folder: folder.to_owned(),
            verified: manifest
                .files
                .iter()
                .map(|file| flags(file.pieces.len()))
                .collect(),
            manifest,
            tensors,
            files,
        })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// The optimizer step after which it was saved.
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// Number of ranks that wrote it; any number may read it.
    pub fn world_size(&self) -> usize {
        self.manifest.world_size
    }

    /// Whose it is.
    pub fn identity(&self) -> &Identity {
        &self.manifest.identity
    }

    /// Names and slots of the saved tensors.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, StateSlot)> {
        self.tensors
            .keys()
            .map(|(name, slot)| (name.as_str(), *slot))
    }

    /// Checks the checksum of every piece.
    ///
    /// # Errors
    /// `File` naming the file and tensor that are damaged.
    pub fn verify(&self) -> Result<()> {
        let mut pieces = self.tensors.values().flat_map(|tensor| &tensor.pieces);
        pieces.try_for_each(|&piece| self.verify_piece(piece))
    }

    fn verify_piece(&self, (file, piece): (usize, usize)) -> Result<()> {
        const CHUNK: usize = 1 << 22;
        let flag = &self.verified[file][piece];
        let mut verified = flag.lock().unwrap_or_else(PoisonError::into_inner);
        if *verified {
            return Ok(());
        }
        let record = self.manifest.piece((file, piece));
        let file = &self.files[file];
        let count = runs::num_elements(&record.runs, record.shape.iter().product()).unwrap_or(0);
        let len = count * record.dtype.size();
        let (mut hash, mut bytes) = (Xxh3::new(), vec![0; len.min(CHUNK)]);
        for start in (0..len).step_by(CHUNK) {
            let part = &mut bytes[..CHUNK.min(len - start)];
            file.read_at(&record.key, start, part)?;
            hash.update(part);
        }
        if format!("{:016x}", hash.digest()) != record.checksum {
            let message = "a tensor's checksum is wrong: the file was damaged after it was written";
            return Err(Error::new(ErrorKind::File, "read_checkpoint", message)
                .with("file", file.path().display())
                .with("tensor", &record.key)
                .help("move this checkpoint's folder away: the one before it is then the newest"));
        }
        *verified = true;
        Ok(())
    }

    pub(super) fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    pub(super) fn tensor(&self, name: &str, slot: StateSlot) -> Result<&SavedTensor> {
        self.tensors.get(&(name.to_owned(), slot)).ok_or_else(|| {
            let message = "the checkpoint has no such tensor";
            Error::new(ErrorKind::Checkpoint, "read_checkpoint", message)
                .with("file", self.folder.display())
                .with("tensor", name)
                .with("slot", format!("{slot:?}"))
        })
    }

    /// Where each run of the tensor is: its elements, the piece, and the element of the piece it starts at.
    fn places(&self, tensor: &SavedTensor) -> Vec<(Range<usize>, (usize, usize), usize)> {
        let mut places = Vec::new();
        for &piece in &tensor.pieces {
            let mut offset = 0;
            for run in runs::expand(&self.manifest.piece(piece).runs) {
                let len = run.len();
                places.push((run, piece, offset));
                offset += len;
            }
        }
        places.sort_by_key(|(run, ..)| run.start);
        places
    }

    fn read_as<T>(
        &self,
        (name, slot): (&str, StateSlot),
        wanted: &[Range<usize>],
        read: impl Fn(&TensorFile, &str, Range<usize>) -> Result<Vec<T>>,
    ) -> Result<Vec<T>> {
        let tensor = self.tensor(name, slot)?;
        let elements: usize = tensor.shape.iter().product();
        let places = self.places(tensor);
        let mut values = Vec::with_capacity(wanted.iter().map(ExactSizeIterator::len).sum());
        for run in wanted {
            if run.end > elements {
                let message = "the run is outside of the saved tensor";
                return Err(
                    Error::new(ErrorKind::Checkpoint, "read_checkpoint", message)
                        .with("tensor", name)
                        .with("found", format!("{run:?}"))
                        .with(
                            "expected",
                            format!("within 0..{elements} (shape {:?})", tensor.shape),
                        ),
                );
            }
            let mut next = run.start;
            // Every element is in one place: opening checked it.
            let first = places.partition_point(|(place, ..)| place.end <= next);
            for (place, piece, offset) in &places[first..] {
                if next >= run.end {
                    break;
                }
                self.verify_piece(*piece)?;
                let end = run.end.min(place.end);
                let start = offset + (next - place.start);
                let key = &self.manifest.piece(*piece).key;
                values.extend(read(
                    &self.files[piece.0],
                    key,
                    start..start + (end - next),
                )?);
                next = end;
            }
        }
        Ok(values)
    }
}

impl StateReader for Checkpoint {
    fn shape(&self, name: &str, slot: StateSlot) -> Option<Vec<usize>> {
        self.tensor(name, slot)
            .ok()
            .map(|tensor| tensor.shape.clone())
    }

    /// Exact from f32, rounded from f64.
    fn read(&self, name: &str, slot: StateSlot, runs: &[Range<usize>]) -> Result<Vec<f32>> {
        self.read_as((name, slot), runs, TensorFile::read_f32)
    }

    fn read_f64(&self, name: &str, slot: StateSlot, runs: &[Range<usize>]) -> Result<Vec<f64>> {
        self.read_as((name, slot), runs, TensorFile::read_f64)
    }

    fn blob(&self, name: &str) -> Option<&Value> {
        self.manifest.blobs.get(name)
    }
}

impl Checkpoint {
    /// Element type in which a tensor was saved (of its first piece).
    pub fn dtype(&self, name: &str, slot: StateSlot) -> Option<DType> {
        let tensor = self.tensor(name, slot).ok()?;
        Some(self.manifest.piece(*tensor.pieces.first()?).dtype)
    }
}

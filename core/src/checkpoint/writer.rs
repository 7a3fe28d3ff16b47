//! One rank's part of a checkpoint being written.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering},
};

use serde_json::Value;

use super::{
    Identity, SaveHandle, StatePiece, StateWriter,
    manifest::{FileRecord, PieceRecord, checksum},
    runs,
    save::{Facts, Writing},
    task::Task,
};
use crate::{
    DType, Error, ErrorKind, Result,
    communicator::Communicator,
    staged_folder::{StagedFolder, beside},
    tensor_file::TensorFileAppender,
};

pub(super) const OPERATION: &str = "write_checkpoint";

/// Writes `rank-XXXXX.safetensors`; rank 0 also owns the folder and writes the manifest, so that each file is
/// opened for writing by one rank, once.
#[derive(Debug)]
pub(super) struct FileStateWriter {
    comm: Arc<dyn Communicator>,
    facts: Facts,
    file: RankFile,
    /// Pieces that wait for a thread to write them; `None` where each is written as it comes.
    staged: Option<Vec<(PieceRecord, Vec<u8>)>>,
    /// The first write that failed: told where all ranks are, so that none waits for this one.
    failed: Option<Error>,
    /// On rank 0.
    folder: Option<StagedFolder>,
}

impl FileStateWriter {
    /// Collective. `check` runs on rank 0 before anything is written. With `staged`, pieces are kept in memory, and a
    /// thread writes them once all have come.
    pub(super) fn begin(
        target: &Path,
        step: u64,
        comm: Arc<dyn Communicator>,
        identity: &Identity,
        staged: bool,
        check: impl FnOnce() -> Result<()>,
    ) -> Result<Self> {
        let folder = match comm.rank() {
            0 => check().and_then(|()| StagedFolder::begin(target)).map(Some),
            _ => Ok(None),
        };
        let folder = comm.agree(OPERATION, folder)?;
        let name = format!("rank-{:05}.safetensors", comm.rank());
        let path = beside(target, "tmp")?.join(name);
        let file = comm.agree(OPERATION, RankFile::create(path))?;
        Ok(Self {
            comm,
            facts: Facts {
                step,
                identity: identity.clone(),
                blobs: BTreeMap::new(),
            },
            file,
            staged: staged.then(Vec::new),
            failed: None,
            folder,
        })
    }
}

impl StateWriter for FileStateWriter {
    fn piece(&mut self, piece: StatePiece<'_>) -> Result<()> {
        let defect = |message: &str| {
            Error::new(ErrorKind::Defect, OPERATION, message)
                .with("tensor", piece.name)
                .with("slot", format!("{:?}", piece.slot))
        };
        if piece.runs.is_empty() && piece.data.is_empty() {
            return Ok(());
        }
        let elements: usize = piece.shape.iter().product();
        let ordered = piece.runs.iter().try_fold(0, |last, run| {
            (last <= run.start && run.start < run.end && run.end <= elements).then_some(run.end)
        });
        let count: usize = piece.runs.iter().map(ExactSizeIterator::len).sum();
        if ordered.is_none() || count != piece.data.len() {
            return Err(defect(
                "runs are not in order within the tensor, or not as long as the data",
            )
            .with(
                "found",
                format!("{count} elements in runs, {} in data", piece.data.len()),
            ));
        }
        let dtype = piece.data.dtype();
        let bytes = match piece.data.host_bytes() {
            Some(bytes) if matches!(dtype, DType::F32 | DType::F64 | DType::Bf16 | DType::F16) => {
                bytes
            }
            _ => return Err(defect("wanted float values in host memory")),
        };
        let record = PieceRecord {
            key: String::new(),
            name: piece.name.to_owned(),
            slot: piece.slot,
            shape: piece.shape.to_vec(),
            dtype,
            runs: runs::shorten(&piece.runs),
            checksum: String::new(),
        };
        match &mut self.staged {
            Some(staged) => staged.push((record, bytes.to_vec())),
            None if self.failed.is_none() => self.failed = self.file.add(record, bytes).err(),
            None => {}
        }
        Ok(())
    }

    fn blob(&mut self, name: &str, value: Value) -> Result<()> {
        match self.facts.blobs.insert(name.to_owned(), value) {
            None => Ok(()),
            Some(_) => Err(
                Error::new(ErrorKind::Defect, OPERATION, "a blob came twice").with("blob", name),
            ),
        }
    }

    fn finish(self: Box<Self>) -> Result<SaveHandle> {
        let Self {
            comm,
            facts,
            mut file,
            staged,
            failed,
            folder,
        } = *self;
        let beside = staged.is_some();
        let file = match (staged, failed) {
            (_, Some(error)) => Task::done(Err(error)),
            (None, None) => Task::done(file.finish()),
            (Some(staged), None) => Task::spawn(move |cancel| {
                for (record, bytes) in staged {
                    if cancel.load(Ordering::Relaxed) {
                        let message = "the save was given up";
                        return Err(Error::new(ErrorKind::Interrupted, OPERATION, message));
                    }
                    file.add(record, &bytes)?;
                }
                file.finish()
            }),
        };
        Ok(SaveHandle::pending(Writing {
            file,
            comm,
            facts,
            folder,
            beside,
        }))
    }
}

/// A rank's file and what it holds.
#[derive(Debug)]
struct RankFile {
    path: PathBuf,
    file: TensorFileAppender,
    keys: BTreeSet<String>,
    pieces: Vec<PieceRecord>,
}

impl RankFile {
    fn create(path: PathBuf) -> Result<Self> {
        Ok(Self {
            file: TensorFileAppender::create(&path)?,
            path,
            keys: BTreeSet::new(),
            pieces: Vec::new(),
        })
    }

    /// Writes a piece, and gives it a key and a checksum.
    fn add(&mut self, mut record: PieceRecord, bytes: &[u8]) -> Result<()> {
        let slot = serde_json::to_value(record.slot).ok();
        let slot = slot.as_ref().and_then(Value::as_str).unwrap_or_default();
        let mut key = format!("{}.{slot}", record.name);
        while !self.keys.insert(key.clone()) {
            key = format!("{}.{slot}.{}", record.name, self.keys.len());
        }
        self.file.append(key.clone(), record.dtype, bytes)?;
        record.checksum = checksum(bytes);
        record.key = key;
        self.pieces.push(record);
        Ok(())
    }

    fn finish(self) -> Result<FileRecord> {
        let name = self.path.file_name().unwrap_or_default();
        Ok(FileRecord {
            name: name.to_string_lossy().into_owned(),
            bytes: self.file.finish()?,
            pieces: self.pieces,
        })
    }
}

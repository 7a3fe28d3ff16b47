//! One rank's part of a checkpoint being written.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::Arc,
};

use serde_json::Value;

use super::{
    Identity, StatePiece, StateWriter,
    manifest::{FileRecord, MANIFEST, Manifest, PieceRecord, checksum},
    runs,
};
use crate::{
    DType, Error, ErrorKind, Result,
    communicator::Communicator,
    staged_folder::{StagedFolder, beside},
    tensor_file::TensorFileAppender,
};

const OPERATION: &str = "write_checkpoint";

/// Writes `rank-XXXXX.safetensors`; rank 0 also owns the folder and writes the manifest, so that each file is
/// opened for writing by one rank, once.
#[derive(Debug)]
pub(super) struct FileStateWriter {
    step: u64,
    comm: Arc<dyn Communicator>,
    identity: Identity,
    path: PathBuf,
    file: TensorFileAppender,
    keys: BTreeSet<String>,
    pieces: Vec<PieceRecord>,
    blobs: BTreeMap<String, Value>,
    /// On rank 0.
    folder: Option<StagedFolder>,
}

impl FileStateWriter {
    /// Collective. `check` runs on rank 0 before anything is written.
    pub(super) fn begin(
        target: &Path,
        step: u64,
        comm: Arc<dyn Communicator>,
        identity: &Identity,
        check: impl FnOnce() -> Result<()>,
    ) -> Result<Self> {
        let folder = match comm.rank() {
            0 => check().and_then(|()| StagedFolder::begin(target)).map(Some),
            _ => Ok(None),
        };
        let folder = comm.agree(OPERATION, folder)?;
        let name = format!("rank-{:05}.safetensors", comm.rank());
        let path = beside(target, "tmp")?.join(name);
        let file = comm.agree(OPERATION, TensorFileAppender::create(&path))?;
        Ok(Self {
            step,
            comm,
            identity: identity.clone(),
            path,
            file,
            keys: BTreeSet::new(),
            pieces: Vec::new(),
            blobs: BTreeMap::new(),
            folder,
        })
    }
}

impl StateWriter for FileStateWriter {
    fn piece(&mut self, piece: StatePiece<'_>) -> Result<()> {
        let defect = |message: &str| {
            Error::new(ErrorKind::Defect, "write_checkpoint", message)
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
        let slot = serde_json::to_value(piece.slot).ok();
        let slot = slot.as_ref().and_then(Value::as_str).unwrap_or_default();
        let mut key = format!("{}.{slot}", piece.name);
        while !self.keys.insert(key.clone()) {
            key = format!("{}.{slot}.{}", piece.name, self.keys.len());
        }
        self.file.append(key.clone(), dtype, bytes)?;
        self.pieces.push(PieceRecord {
            key,
            name: piece.name.to_owned(),
            slot: piece.slot,
            shape: piece.shape.to_vec(),
            dtype,
            runs: runs::shorten(&piece.runs),
            checksum: checksum(bytes),
        });
        Ok(())
    }

    fn blob(&mut self, name: &str, value: Value) -> Result<()> {
        match self.blobs.insert(name.to_owned(), value) {
            None => Ok(()),
            Some(_) => Err(
                Error::new(ErrorKind::Defect, "write_checkpoint", "a blob came twice")
                    .with("blob", name),
            ),
        }
    }

    fn finish(self: Box<Self>) -> Result<()> {
        let Self {
            step,
            comm,
            identity,
            path,
            file,
            pieces,
            blobs,
            folder,
            ..
        } = *self;
        let record = file.finish().map(|bytes| FileRecord {
            name: path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned(),
            bytes,
            pieces,
        });
        let record = comm.agree(OPERATION, record)?;
        let json = serde_json::to_vec(&record).map_err(malformed);
        let records = collect(&comm, comm.agree(OPERATION, json)?)?;
        let committed = match folder {
            Some(folder) => commit(step, identity, records, blobs, folder),
            None => Ok(()),
        };
        // Also the barrier after which every rank sees the checkpoint.
        comm.agree(OPERATION, committed)
    }
}

fn commit(
    step: u64,
    identity: Identity,
    records: Vec<Vec<u8>>,
    blobs: BTreeMap<String, Value>,
    folder: StagedFolder,
) -> Result<()> {
    let files = (records.iter())
        .map(|json| serde_json::from_slice(json).map_err(malformed))
        .collect::<Result<Vec<FileRecord>>>()?;
    let manifest = Manifest::new(step, identity, files, blobs);
    // What could not be read back is not written.
    manifest.tensors()?;
    folder.write(MANIFEST, manifest.to_json()?.as_bytes())?;
    folder.commit()
}

/// Every rank's bytes in rank order on rank 0, nothing elsewhere.
fn collect(comm: &Arc<dyn Communicator>, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>> {
    if comm.rank() != 0 {
        comm.send(vec![bytes.len() as i64].into(), 0)?.wait()?;
        comm.send(bytes.into(), 0)?.wait()?;
        return Ok(Vec::new());
    }
    let mut all = vec![bytes];
    for rank in 1..comm.world_size() {
        let length: Vec<i64> = comm.receive(DType::I64, 1, rank)?.wait()?.try_into()?;
        let bytes = comm.receive(DType::U8, length[0] as usize, rank)?.wait()?;
        all.push(bytes.try_into()?);
    }
    Ok(all)
}

fn malformed(cause: serde_json::Error) -> Error {
    let message = "a rank's list of pieces is malformed";
    Error::new(ErrorKind::Defect, "write_checkpoint", message).caused_by(cause)
}

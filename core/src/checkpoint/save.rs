//! From the pieces of every rank to a checkpoint that is visible.
//!
//! Two stages of work, each of which a thread may do beside the training: every rank writes and syncs its file; then
//! rank 0 writes the manifest, the last of the files, and renames the folder. Between them the ranks agree, on the
//! threads that train, so that collective operations come in one order on every rank.

use std::{collections::BTreeMap, sync::Arc};

use serde_json::Value;

use super::{
    Identity, PendingSave, SaveHandle,
    manifest::{FileRecord, MANIFEST, Manifest},
    task::Task,
    writer::OPERATION,
};
use crate::{
    DType, Error, ErrorKind, Result, communicator::Communicator, staged_folder::StagedFolder,
};

/// What the manifest says beside the ranks' files.
#[derive(Debug)]
pub(super) struct Facts {
    pub(super) step: u64,
    pub(super) identity: Identity,
    pub(super) blobs: BTreeMap<String, Value>,
}

/// The first stage: this rank's file.
#[derive(Debug)]
pub(super) struct Writing {
    // Before the folder, so that whoever gives a save up ends its thread before the folder goes.
    pub(super) file: Task<FileRecord>,
    pub(super) comm: Arc<dyn Communicator>,
    pub(super) facts: Facts,
    /// On rank 0.
    pub(super) folder: Option<StagedFolder>,
    /// Whether threads do the work.
    pub(super) beside: bool,
}

impl PendingSave for Writing {
    fn is_ready(&self) -> bool {
        self.file.is_finished()
    }

    fn advance(self: Box<Self>) -> Result<SaveHandle> {
        let Self {
            file,
            comm,
            facts,
            folder,
            beside,
        } = *self;
        let record = comm.agree(OPERATION, file.join())?;
        let json = serde_json::to_vec(&record).map_err(malformed);
        let records = collect(&comm, comm.agree(OPERATION, json)?)?;
        let committed = match folder {
            None => Task::done(Ok(())),
            Some(folder) if beside => Task::spawn(move |_| commit(facts, records, folder)),
            Some(folder) => Task::done(commit(facts, records, folder)),
        };
        Ok(SaveHandle::pending(Committing { committed, comm }))
    }
}

/// The second stage: the manifest and the folder.
#[derive(Debug)]
struct Committing {
    committed: Task<()>,
    comm: Arc<dyn Communicator>,
}

impl PendingSave for Committing {
    fn is_ready(&self) -> bool {
        self.committed.is_finished()
    }

    fn advance(self: Box<Self>) -> Result<SaveHandle> {
        // Also the barrier after which every rank sees the checkpoint.
        self.comm.agree(OPERATION, self.committed.join())?;
        Ok(SaveHandle::done())
    }
}

fn commit(facts: Facts, records: Vec<Vec<u8>>, folder: StagedFolder) -> Result<()> {
    let files = (records.iter())
        .map(|json| serde_json::from_slice(json).map_err(malformed))
        .collect::<Result<Vec<FileRecord>>>()?;
    let manifest = Manifest::new(facts.step, facts.identity, files, facts.blobs);
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
    Error::new(ErrorKind::Defect, OPERATION, message).caused_by(cause)
}

//! The folder of a job's checkpoints.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{Checkpoint, Identity, StateWriter, manifest::Manifest, writer::FileStateWriter};
use crate::{
    Error, ErrorKind, Result,
    communicator::Communicator,
    staged_folder::{beside, cannot_write, sync_folder},
};

/// A folder with one checkpoint a folder in it: `step-00000003/` with a `rank-00000.safetensors` a rank and, written
/// last, `manifest.json`.
///
/// Which is the latest follows from the names: there is no pointer that could be stale. A kill at any moment
/// leaves every earlier checkpoint as it was.
#[derive(Debug, Clone)]
pub struct CheckpointStore {
    root: PathBuf,
}

/// What a store's folder holds.
#[derive(Debug, Default)]
pub struct Scan {
    /// Complete checkpoints by step.
    pub complete: BTreeMap<u64, PathBuf>,
    /// Folders that look like checkpoints and are none, with the reason.
    pub incomplete: Vec<(PathBuf, Error)>,
}

impl CheckpointStore {
    /// The store in this folder, which need not exist yet.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// A writer of this rank's part of a checkpoint. Collective, as is what its `finish` leaves to do: until that
    /// ends nothing is visible, and a checkpoint of the same step stays. If one rank fails, all do.
    ///
    /// # Errors
    /// `Checkpoint`, before anything is written, if the store's latest checkpoint is of another model; `File` if
    /// the folder cannot be written; communicator errors.
    pub fn writer(
        &self,
        step: u64,
        comm: &Arc<dyn Communicator>,
        identity: &Identity,
    ) -> Result<Box<dyn StateWriter>> {
        self.begin(step, comm, identity, false)
    }

    /// The same, but for when it is written: pieces are copied in memory, and once all have come a thread writes
    /// them while this one goes on. One save at a time; [`Self::prune`] comes when it has ended.
    ///
    /// # Errors
    /// As [`Self::writer`].
    pub fn background_writer(
        &self,
        step: u64,
        comm: &Arc<dyn Communicator>,
        identity: &Identity,
    ) -> Result<Box<dyn StateWriter>> {
        self.begin(step, comm, identity, true)
    }

    fn begin(
        &self,
        step: u64,
        comm: &Arc<dyn Communicator>,
        identity: &Identity,
        staged: bool,
    ) -> Result<Box<dyn StateWriter>> {
        let check = || match self.scan()?.complete.last_key_value() {
            Some((_, path)) => {
                let found = Manifest::read(path)?.identity;
                // The data may have been changed on purpose; a model never changes.
                identity
                    .accept_model(&found)
                    .map_err(|e| e.with("file", path.display()))
            }
            None => Ok(()),
        };
        let target = self.folder(step);
        Ok(Box::new(FileStateWriter::begin(
            &target,
            step,
            comm.clone(),
            identity,
            staged,
            check,
        )?))
    }

    /// The highest step of a complete checkpoint. Those that are not complete are logged as warnings.
    ///
    /// # Errors
    /// As [`Self::scan`].
    pub fn latest(&self) -> Result<Option<u64>> {
        let scan = self.scan()?;
        for (folder, error) in &scan.incomplete {
            tracing::warn!(
                "{}: a damaged checkpoint is passed over: {error}",
                folder.display()
            );
        }
        Ok(scan.complete.last_key_value().map(|(step, _)| *step))
    }

    /// Whether there is any checkpoint, complete or not.
    ///
    /// # Errors
    /// As [`Self::scan`].
    pub fn is_empty(&self) -> Result<bool> {
        let scan = self.scan()?;
        Ok(scan.complete.is_empty() && scan.incomplete.is_empty())
    }

    /// Removes every checkpoint, complete or not.
    ///
    /// # Errors
    /// `File` if a folder cannot be removed.
    pub fn clear(&self) -> Result<()> {
        let scan = self.scan()?;
        let incomplete = scan.incomplete.into_iter().map(|(path, _)| path);
        for path in scan.complete.into_values().chain(incomplete) {
            fs::remove_dir_all(&path).map_err(|e| cannot_write(&path, e))?;
        }
        self.sweep()
    }

    /// Removes what a kill left of a checkpoint that was being written or removed.
    fn sweep(&self) -> Result<()> {
        let entries = fs::read_dir(&self.root).into_iter().flatten().flatten();
        for path in entries.map(|entry| entry.path()) {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with(".step-") && name.ends_with(".tmp") {
                fs::remove_dir_all(&path).map_err(|e| cannot_write(&path, e))?;
            }
        }
        Ok(())
    }

    /// The checkpoint of a step, for a job that continues it.
    ///
    /// # Errors
    /// `Checkpoint` if it belongs to another model or data set; as [`Self::open`].
    pub fn open_for(&self, step: u64, identity: &Identity) -> Result<Checkpoint> {
        let checkpoint = self.open(step)?;
        let accepted = identity.accept(checkpoint.identity());
        accepted.map_err(|e| e.with("file", checkpoint.path().display()))?;
        Ok(checkpoint)
    }

    /// The checkpoint of a step, whosever it is: for inspection.
    ///
    /// # Errors
    /// `Checkpoint` if there is none, naming those there are; as [`Checkpoint::open`].
    pub fn open(&self, step: u64) -> Result<Checkpoint> {
        let scan = self.scan()?;
        let Some(path) = scan.complete.get(&step) else {
            let message = "there is no complete checkpoint of this step";
            return Err(
                Error::new(ErrorKind::Checkpoint, "open_checkpoint", message)
                    .with("file", self.root.display())
                    .with("step", step)
                    .with(
                        "found",
                        format!("steps {:?}", scan.complete.keys().collect::<Vec<_>>()),
                    ),
            );
        };
        Checkpoint::open(path)
    }

    /// Steps of the complete checkpoints, in order.
    ///
    /// # Errors
    /// As [`Self::scan`].
    pub fn list(&self) -> Result<Vec<u64>> {
        Ok(self.scan()?.complete.into_keys().collect())
    }

    /// Looks at every checkpoint's manifest and file lengths.
    ///
    /// # Errors
    /// `File` if the folder is there and cannot be read.
    pub fn scan(&self) -> Result<Scan> {
        let mut scan = Scan::default();
        if !self.root.exists() {
            return Ok(scan);
        }
        let fail = |e| {
            Error::new(
                ErrorKind::File,
                "list_checkpoints",
                "cannot read the folder of checkpoints",
            )
            .with("file", self.root.display())
            .caused_by(e)
        };
        let mut found: BTreeMap<u64, (bool, PathBuf)> = BTreeMap::new();
        for entry in fs::read_dir(&self.root).map_err(fail)? {
            let path = entry.map_err(fail)?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            // A kill while a checkpoint was replaced can leave the old one under this name only.
            let hidden = name
                .strip_prefix('.')
                .and_then(|name| name.strip_suffix(".old"));
            let step = (hidden.unwrap_or(&name).strip_prefix("step-"))
                .filter(|digits| digits.len() >= 8 && digits.bytes().all(|b| b.is_ascii_digit()))
                .and_then(|digits| digits.parse().ok());
            if let Some(step) = step
                && (hidden.is_none() || !found.contains_key(&step))
            {
                found.insert(step, (hidden.is_some(), path));
            }
        }
        for (step, (_, path)) in found {
            match Manifest::read(&path).and_then(|m| check_step(&m, step, &path)) {
                Ok(()) => {
                    scan.complete.insert(step, path);
                }
                Err(error) => scan.incomplete.push((path, error)),
            }
        }
        Ok(scan)
    }

    /// Removes complete checkpoints but the `keep` latest (at least one stays) and returns the removed steps; also
    /// what a kill left of others. To be called by one rank, while none writes.
    ///
    /// # Errors
    /// `File` if a folder cannot be removed.
    pub fn prune(&self, keep: usize) -> Result<Vec<u64>> {
        self.sweep()?;
        let complete = self.scan()?.complete;
        let surplus = complete.len().saturating_sub(keep.max(1));
        let mut removed = Vec::new();
        for (step, path) in complete.into_iter().take(surplus) {
            // Renamed first: a kill while files are removed must not leave a half checkpoint under its name.
            let doomed = beside(&self.folder(step), "tmp")?;
            if doomed.exists() {
                fs::remove_dir_all(&doomed).map_err(|e| cannot_write(&doomed, e))?;
            }
            fs::rename(&path, &doomed).map_err(|e| cannot_write(&path, e))?;
            sync_folder(&self.root)?;
            fs::remove_dir_all(&doomed).map_err(|e| cannot_write(&doomed, e))?;
            removed.push(step);
        }
        Ok(removed)
    }

    fn folder(&self, step: u64) -> PathBuf {
        self.root.join(format!("step-{step:08}"))
    }
}

fn check_step(manifest: &Manifest, step: u64, path: &Path) -> Result<()> {
    if manifest.step == step {
        return Ok(());
    }
    let message = "the folder's name is not the step in its manifest";
    Err(
        Error::new(ErrorKind::Checkpoint, "open_checkpoint", message)
            .with("file", path.display())
            .with("found", manifest.step)
            .with("expected", step),
    )
}

//! A folder that appears whole or not at all: written beside its place, synced, then renamed.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use crate::{Error, ErrorKind, Result};

/// A folder being written. Dropped before [`Self::commit`], it leaves nothing behind.
#[derive(Debug)]
pub(crate) struct StagedFolder {
    target: PathBuf,
    staging: PathBuf,
    committed: bool,
}

impl StagedFolder {
    /// Starts a folder that will be at `target`; what an earlier, killed attempt left is cleared away.
    pub(crate) fn begin(target: &Path) -> Result<Self> {
        let parent = parent(target)?;
        fs::create_dir_all(parent).map_err(|e| cannot_write(parent, e))?;
        recover(target)?;
        let staging = beside(target, "tmp")?;
        if staging.exists() {
            fs::remove_dir_all(&staging).map_err(|e| cannot_write(&staging, e))?;
        }
        fs::create_dir(&staging).map_err(|e| cannot_write(&staging, e))?;
        Ok(Self {
            target: target.to_owned(),
            staging,
            committed: false,
        })
    }

    /// Where to write until the commit.
    pub(crate) fn path(&self) -> &Path {
        &self.staging
    }

    /// Writes and syncs a small file.
    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let path = self.staging.join(name);
        let write = || -> io::Result<()> {
            let mut file = File::create_new(&path)?;
            io::Write::write_all(&mut file, bytes)?;
            file.sync_all()
        };
        write().map_err(|e| cannot_write(&path, e))
    }

    /// Copies and syncs a file, following links.
    pub(crate) fn copy(&self, from: &Path, name: &str) -> Result<()> {
        let path = self.staging.join(name);
        let copy = || -> io::Result<()> {
            fs::copy(from, &path)?;
            File::open(&path)?.sync_all()
        };
        copy().map_err(|e| cannot_write(&path, e).with("copied from", from.display()))
    }

    /// Puts the folder in its place. A folder that is there is replaced; a kill between the two renames leaves
    /// it under its `.old` name, from where [`recover`] brings it back.
    pub(crate) fn commit(mut self) -> Result<()> {
        let (target, staging) = (&self.target, &self.staging);
        sync_folder(staging)?;
        let old = beside(target, "old")?;
        let replaces = target.exists();
        if replaces {
            fs::rename(target, &old).map_err(|e| cannot_write(target, e))?;
        }
        if let Err(cause) = fs::rename(staging, target) {
            if replaces && let Err(second) = fs::rename(&old, target) {
                tracing::error!(from = %old.display(), to = %target.display(), %second, "cannot rename back");
            }
            return Err(cannot_write(target, cause));
        }
        self.committed = true;
        sync_folder(parent(&self.target)?)?;
        if replaces && let Err(cause) = fs::remove_dir_all(&old) {
            tracing::warn!(folder = %old.display(), %cause, "cannot remove what was replaced");
        }
        Ok(())
    }
}

impl Drop for StagedFolder {
    fn drop(&mut self) {
        if !self.committed
            && let Err(cause) = fs::remove_dir_all(&self.staging)
        {
            tracing::warn!(folder = %self.staging.display(), %cause, "cannot remove an unfinished folder");
        }
    }
}

/// Finishes a replacement that was killed half-way: the old folder comes back if nothing took its place.
pub(crate) fn recover(target: &Path) -> Result<()> {
    let old = beside(target, "old")?;
    if !old.exists() {
        return Ok(());
    }
    match target.exists() {
        true => fs::remove_dir_all(&old).map_err(|e| cannot_write(&old, e)),
        false => fs::rename(&old, target).map_err(|e| cannot_write(target, e)),
    }
}

/// The hidden sibling `.NAME.SUFFIX`.
pub(crate) fn beside(target: &Path, suffix: &str) -> Result<PathBuf> {
    match target.file_name() {
        Some(name) => Ok(target.with_file_name(format!(".{}.{suffix}", name.to_string_lossy()))),
        None => Err(
            Error::new(ErrorKind::File, "write_folder", "not a name for a folder")
                .with("file", target.display()),
        ),
    }
}

/// Makes the entries of a folder durable.
pub(crate) fn sync_folder(path: &Path) -> Result<()> {
    File::open(path)
        .and_then(|folder| folder.sync_all())
        .map_err(|e| cannot_write(path, e))
}

/// A write that failed.
pub(crate) fn cannot_write(path: &Path, cause: io::Error) -> Error {
    let help = match cause.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            "free space there, or write to another place; nothing half-written is left"
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "choose a place that this user may write to"
        }
        _ => "see the cause; nothing half-written is left",
    };
    Error::new(ErrorKind::File, "write_folder", "cannot write")
        .with("file", path.display())
        .caused_by(cause)
        .help(help)
}

fn parent(target: &Path) -> Result<&Path> {
    match target.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Ok(Path::new(".")),
        Some(parent) => Ok(parent),
        None => Err(
            Error::new(ErrorKind::File, "write_folder", "not a name for a folder")
                .with("file", target.display()),
        ),
    }
}

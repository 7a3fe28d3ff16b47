//! Files that appear whole or not at all: written beside, synced, then renamed.

use std::{
    fs::File,
    io::{BufWriter, Read, Write},
    path::{Path, PathBuf},
};

use tempfile::NamedTempFile;

use crate::{Error, ErrorKind, Result};

/// Opens a file to read it. A pipe would make the program wait for a writer that may never come, a device may
/// never end: only regular files are opened.
///
/// # Errors
/// The system's; `InvalidInput` where the path is no regular file.
pub fn open_regular(path: &Path) -> std::io::Result<File> {
    if !std::fs::metadata(path)?.is_file() {
        let message = "not a regular file";
        return Err(std::io::Error::new(
            std::io::ErrorKind::InvalidInput,
            message,
        ));
    }
    File::open(path)
}

/// The text of a regular file of at most `most` bytes.
///
/// # Errors
/// As [`open_regular`]; `FileTooLarge` where it has more, `InvalidData` where it is not UTF-8.
pub fn read_text(path: &Path, most: u64) -> std::io::Result<String> {
    read_all(open_regular(path)?, most)
}

/// The text of a stream that ends within `most` bytes.
///
/// # Errors
/// As [`read_text`].
pub fn read_all(stream: impl Read, most: u64) -> std::io::Result<String> {
    let mut text = String::new();
    let size = stream
        .take(most.saturating_add(1))
        .read_to_string(&mut text)?;
    if size as u64 > most {
        let message = format!("more than {most} bytes");
        return Err(std::io::Error::new(
            std::io::ErrorKind::FileTooLarge,
            message,
        ));
    }
    Ok(text)
}

/// A file in the making. Dropped without [`Self::commit`] it leaves nothing.
#[derive(Debug)]
pub struct AtomicFile {
    target: PathBuf,
    writer: BufWriter<NamedTempFile>,
}

impl AtomicFile {
    /// Starts a file that will be `target`; its folder is made if it is not there.
    ///
    /// # Errors
    /// `File` naming the path.
    pub fn create(target: &Path) -> Result<Self> {
        let folder = match target.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        let temporary = std::fs::create_dir_all(folder)
            .and_then(|()| tempfile::Builder::new().prefix(".tmp-").tempfile_in(folder))
            .map_err(|cause| failed(target, cause))?;
        Ok(Self {
            target: target.to_owned(),
            writer: BufWriter::new(temporary),
        })
    }

    /// Makes the file visible under its name, replacing one that was there.
    ///
    /// # Errors
    /// `File` naming the path; then the old file, if any, is still there.
    pub fn commit(self) -> Result<()> {
        let Self { target, writer } = self;
        let temporary = writer
            .into_inner()
            .map_err(|error| failed(&target, error.into_error()))?;
        let permissions = default_permissions(temporary.as_file());
        permissions
            .and_then(|()| temporary.as_file().sync_all())
            .map_err(|cause| failed(&target, cause))?;
        temporary
            .persist(&target)
            .map_err(|error| failed(&target, error.error))?;
        Ok(())
    }
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.writer.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.writer.flush()
    }
}

/// Writes a whole file at once.
///
/// # Errors
/// `File` naming the path.
pub fn write_atomic(target: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = AtomicFile::create(target)?;
    file.write_all(bytes)
        .map_err(|cause| failed(target, cause))?;
    file.commit()
}

/// Temporary files are private; results are as any other file.
fn default_permissions(file: &File) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    file.set_permissions(std::fs::Permissions::from_mode(0o644))
}

fn failed(target: &Path, cause: std::io::Error) -> Error {
    Error::new(ErrorKind::File, "write_file", "cannot write the file")
        .with("file", target.display())
        .caused_by(cause)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_left_of_a_file_that_was_not_committed() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("sub/file.txt");
        let mut file = AtomicFile::create(&target).unwrap();
        file.write_all(b"half").unwrap();
        drop(file);
        assert_eq!(
            std::fs::read_dir(folder.path().join("sub"))
                .unwrap()
                .count(),
            0
        );
        write_atomic(&target, b"whole").unwrap();
        assert_eq!(std::fs::read(&target).unwrap(), b"whole");
    }

    #[test]
    fn a_folder_that_is_a_file_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("file/below");
        std::fs::write(folder.path().join("file"), b"x").unwrap();
        let error = write_atomic(&target, b"y").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::File);
        assert!(error.to_string().contains("below"), "{error}");
    }
}

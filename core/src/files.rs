//! Files that appear whole or not at all: written beside, synced, then renamed.

use std::{
    fs::{File, OpenOptions},
    io::{self, BufWriter, Read, Write},
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
///
/// A link is followed: what it names is replaced, and the link stays. A device or a pipe cannot be replaced, so it is
/// written straight to.
#[derive(Debug)]
pub struct AtomicFile {
    target: PathBuf,
    writer: Writer,
}

#[derive(Debug)]
enum Writer {
    Beside(BufWriter<NamedTempFile>),
    Straight(BufWriter<File>),
}

impl AtomicFile {
    /// Starts a file that will be `target`; its folder is made if it is not there.
    ///
    /// # Errors
    /// `File` naming the path.
    pub fn create(target: &Path) -> Result<Self> {
        let followed = follow(target);
        let folder = match followed.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        // The system follows links that name no path, such as /dev/stdout.
        let open = || match std::fs::metadata(target) {
            Ok(meta) if meta.is_dir() => Err(io::Error::from(io::ErrorKind::IsADirectory)),
            Ok(meta) if !meta.is_file() => {
                let file = OpenOptions::new().write(true).open(target)?;
                Ok(Writer::Straight(BufWriter::new(file)))
            }
            _ => {
                std::fs::create_dir_all(folder)?;
                let file = tempfile::Builder::new()
                    .prefix(".tmp-")
                    .tempfile_in(folder)?;
                Ok(Writer::Beside(BufWriter::new(file)))
            }
        };
        let writer = open().map_err(|cause| failed(target, cause))?;
        Ok(Self {
            target: followed,
            writer,
        })
    }

    /// Makes the file visible under its name, replacing one that was there.
    ///
    /// # Errors
    /// `File` naming the path; then the old file, if any, is still there.
    pub fn commit(self) -> Result<()> {
        let Self { target, writer } = self;
        let written = match writer {
            Writer::Straight(mut writer) => writer.flush(),
            Writer::Beside(writer) => writer.into_inner().map_err(|e| e.into_error()).and_then(
                |temporary| -> io::Result<()> {
                    default_permissions(temporary.as_file())?;
                    temporary.as_file().sync_all()?;
                    temporary.persist(&target).map_err(|e| e.error)?;
                    Ok(())
                },
            ),
        };
        written.map_err(|cause| failed(&target, cause))
    }
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.writer {
            Writer::Beside(writer) => writer.write(bytes),
            Writer::Straight(writer) => writer.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.writer {
            Writer::Beside(writer) => writer.flush(),
            Writer::Straight(writer) => writer.flush(),
        }
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

/// Where a path really leads, links followed as far as it exists: two names of one place are equal.
pub fn real(path: &Path) -> PathBuf {
    let path = follow(path);
    let path = std::path::absolute(&path).unwrap_or(path);
    for existing in path.ancestors() {
        if let Ok(found) = existing.canonicalize() {
            return match path.strip_prefix(existing) {
                Ok(rest) if !rest.as_os_str().is_empty() => found.join(rest),
                _ => found,
            };
        }
    }
    path
}

/// Bytes that may still be written to the file system of a folder that exists, where the system tells.
pub fn free_bytes(folder: &Path) -> Option<u64> {
    #[cfg(unix)]
    {
        let system = rustix::fs::statvfs(folder).ok()?;
        Some(system.f_bavail.saturating_mul(system.f_frsize))
    }
    #[cfg(not(unix))]
    None
}

/// The path, or what it names if it is a link, whether or not that exists.
fn follow(path: &Path) -> PathBuf {
    // As many links in a row as Linux follows.
    const MAX_LINKS: usize = 40;
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        let Ok(next) = std::fs::read_link(&path) else {
            break;
        };
        path = path.parent().unwrap_or(Path::new("")).join(next);
    }
    path
}

/// Temporary files are private; results are as any other file.
fn default_permissions(file: &File) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    file.set_permissions(std::fs::Permissions::from_mode(0o644))
}

fn failed(target: &Path, cause: io::Error) -> Error {
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

    #[test]
    fn a_link_stays_and_what_it_names_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir(at("sub")).unwrap();
        std::fs::write(at("sub/old"), "old").unwrap();
        std::os::unix::fs::symlink("sub/old", at("link")).unwrap();
        std::os::unix::fs::symlink("sub/new", at("dangling")).unwrap();
        assert_eq!(real(&at("link")), real(&at("sub/old")));
        for (link, names) in [("link", "sub/old"), ("dangling", "sub/new")] {
            write_atomic(&at(link), b"text").unwrap();
            assert!(at(link).is_symlink());
            assert_eq!(std::fs::read(at(names)).unwrap(), b"text");
        }
        assert_eq!(
            real(&at("sub/../none/x")),
            real(folder.path()).join("none/x")
        );
    }

    #[test]
    fn a_pipe_is_written_to_and_stays() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        assert!(made.unwrap().success());
        let reader = std::thread::spawn({
            let pipe = pipe.clone();
            move || std::fs::read(pipe).unwrap()
        });
        write_atomic(&pipe, b"through").unwrap();
        assert_eq!(reader.join().unwrap(), b"through");
        assert!(!pipe.metadata().unwrap().is_file());
    }

    #[test]
    fn a_folder_is_not_written_over() {
        let folder = tempfile::tempdir().unwrap();
        let error = write_atomic(folder.path(), b"x").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::File);
        assert!(free_bytes(folder.path()).unwrap() > 0);
    }
}

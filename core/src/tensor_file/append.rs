//! Writes a file whose tensors are not known beforehand: data as it comes, the header at the end, in room that
//! was left for it.

use std::{
    fs::File,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use super::{header, padded};
use crate::{DType, Result, staged_folder::cannot_write};

/// Enough for about a thousand tensors.
const HEADER_ROOM: u64 = 128 << 10;
const SHIFT_CHUNK: u64 = 4 << 20;

/// A file being written.
#[derive(Debug)]
pub(crate) struct TensorFileAppender {
    path: PathBuf,
    file: File,
    tensors: Vec<(String, DType, usize)>,
    /// Where data begins and ends.
    start: u64,
    end: u64,
}

impl TensorFileAppender {
    /// Creates a file, which must not exist.
    pub(crate) fn create(path: &Path) -> Result<Self> {
        Self::with_room(path, HEADER_ROOM)
    }

    pub(super) fn with_room(path: &Path, room: u64) -> Result<Self> {
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)
            .map_err(|e| cannot_write(path, e))?;
        Ok(Self {
            path: path.to_owned(),
            file,
            tensors: Vec::new(),
            start: room,
            end: room,
        })
    }

    /// Adds a 1-D tensor of these elements. Names are the caller's to keep apart.
    pub(crate) fn append(&mut self, name: String, dtype: DType, bytes: &[u8]) -> Result<()> {
        (self.file.write_all_at(bytes, self.end)).map_err(|e| cannot_write(&self.path, e))?;
        self.end += bytes.len() as u64;
        self.tensors.push((name, dtype, bytes.len() / dtype.size()));
        Ok(())
    }

    /// Writes the header, makes the file durable and returns its length.
    pub(crate) fn finish(mut self) -> Result<u64> {
        let shapes: Vec<[usize; 1]> = self.tensors.iter().map(|t| [t.2]).collect();
        let tensors: Vec<_> = (self.tensors.iter().zip(&shapes))
            .map(|((name, dtype, _), shape)| (name.as_str(), *dtype, shape.as_slice()))
            .collect();
        let (json, _) = header(&tensors);
        let needed = padded(&json, 0).len() as u64;
        let fail = |e| cannot_write(&self.path, e);
        if needed > self.start {
            let by = needed - self.start;
            shift(&self.file, self.start..self.end, by).map_err(fail)?;
            self.start += by;
            self.end += by;
        }
        let bytes = padded(&json, self.start as usize);
        self.file.write_all_at(&bytes, 0).map_err(fail)?;
        self.file.sync_all().map_err(fail)?;
        Ok(self.end)
    }
}

/// Moves a range of the file towards its end, last part first so that nothing is overwritten unread.
fn shift(file: &File, range: std::ops::Range<u64>, by: u64) -> std::io::Result<()> {
    let mut end = range.end;
    let mut chunk = vec![0; SHIFT_CHUNK.min(range.end - range.start) as usize];
    while end > range.start {
        let start = range.start.max(end.saturating_sub(SHIFT_CHUNK));
        let bytes = &mut chunk[..(end - start) as usize];
        file.read_exact_at(bytes, start)?;
        file.write_all_at(bytes, start + by)?;
        end = start;
    }
    Ok(())
}

//! What a checkpoint holds, for those who look into it.

use serde_json::Value;

use super::{Checkpoint, StateSlot, runs};
use crate::{DType, Result};

/// A rank's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SavedFile<'a> {
    /// Its name in the checkpoint's folder.
    pub name: &'a str,
    /// Its length.
    pub bytes: u64,
    /// Number of pieces in it.
    pub pieces: usize,
}

/// A part of a tensor: what one rank wrote of it at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavedPiece<'a> {
    /// The file it is in.
    pub file: &'a str,
    /// Its name there.
    pub key: &'a str,
    /// Its element type.
    pub dtype: DType,
    /// Number of elements.
    pub elements: usize,
    /// Number of runs of the flattened tensor that they are.
    pub runs: usize,
    /// The first of these elements in the flattened tensor.
    pub first: usize,
    /// XXH3 of its bytes, in hexadecimal.
    pub checksum: &'a str,
}

impl Checkpoint {
    /// The files, in rank order.
    pub fn files(&self) -> impl Iterator<Item = SavedFile<'_>> {
        self.manifest().files.iter().map(|file| SavedFile {
            name: &file.name,
            bytes: file.bytes,
            pieces: file.pieces.len(),
        })
    }

    /// The pieces of a tensor, in rank order.
    ///
    /// # Errors
    /// `Checkpoint` if it was not saved.
    pub fn pieces(&self, name: &str, slot: StateSlot) -> Result<Vec<SavedPiece<'_>>> {
        let places = &self.tensor(name, slot)?.pieces;
        Ok(places
            .iter()
            .map(|&place| {
                let piece = self.manifest().piece(place);
                let runs = || runs::expand(&piece.runs);
                SavedPiece {
                    file: &self.manifest().files[place.0].name,
                    key: &piece.key,
                    dtype: piece.dtype,
                    elements: runs().map(|run| run.len()).sum(),
                    runs: runs().count(),
                    first: runs().next().map_or(0, |run| run.start),
                    checksum: &piece.checksum,
                }
            })
            .collect())
    }

    /// Names and values of the blobs.
    pub fn blobs(&self) -> impl Iterator<Item = (&str, &Value)> {
        let blobs = self.manifest().blobs.iter();
        blobs.map(|(name, value)| (name.as_str(), value))
    }
}

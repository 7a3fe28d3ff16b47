//! A jsonl file as sequences: checked whole when it is opened, kept in memory up to a budget.

mod assemble;
mod order;
mod read;
mod schema;
mod source;

use std::{
    borrow::Cow,
    fs::File,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use drivetrain_core::{Error, ErrorKind, Result, batch::Batch};
use xxhash_rust::xxh3::xxh3_64;

use crate::{
    DatasetOptions,
    line::{LineReader, Place, Sample},
};
use schema::Schema;
pub use source::EpochBatches;

/// A jsonl file as sequences. Shared by those that draw batches of it.
///
/// ```
/// use std::sync::Arc;
/// use drivetrain_core::{config::Overlong, trainer::BatchSource};
/// use drivetrain_data::{Dataset, DatasetOptions};
/// # let folder = tempfile::tempdir()?;
/// # let file = folder.path().join("train.jsonl");
/// std::fs::write(&file, "{\"tokens\": [1, 2, 3]}\n{\"prompt\": [4, 5], \"completion\": [6]}\n")?;
/// let options = DatasetOptions {
///     vocab_size: 97,
///     max_length: 64,
///     overlong: Overlong::Error,
///     shuffle: false,
///     tokenizer: folder.path().to_owned(),
///     cache_bytes: 1 << 20,
/// };
/// let dataset = Arc::new(Dataset::open(&file, &options)?);
/// let batch = dataset.batches(2, 0)?.next_batch()?;
/// assert_eq!(batch.tokens(), [1, 2, 3, 4, 5, 6]);
/// assert_eq!(batch.scored(), [false, true, true, false, false, true]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Dataset {
    path: PathBuf,
    file: File,
    reader: LineReader,
    records: Vec<Record>,
    /// Where each group starts among the records, and the end.
    groups: Vec<usize>,
    schema: Schema,
    num_sequences: usize,
    skipped: usize,
    truncated: usize,
    shuffle: bool,
    identity: u128,
}

/// A usable line.
#[derive(Debug)]
struct Record {
    offset: u64,
    num_bytes: usize,
    /// Of the line's bytes, so that a file that changed is not trained on.
    hash: u64,
    line: usize,
    num_sequences: usize,
    /// Whether any of its tokens is scored.
    scored: bool,
    cached: Option<Vec<Sample>>,
}

impl Dataset {
    /// Reads the file once and checks every line.
    ///
    /// # Errors
    /// `File` if the file, or a tokenizer that its lines need, cannot be read; `Data` naming file, line and field
    /// of up to ten faults, or if no line is usable.
    pub fn open(path: &Path, options: &DatasetOptions) -> Result<Self> {
        read::open(path, options)
    }

    /// Sequences that are used.
    pub fn len(&self) -> usize {
        self.num_sequences
    }

    /// Never true: a file without a usable line does not open.
    pub fn is_empty(&self) -> bool {
        self.num_sequences == 0
    }

    /// Sequences left out: over the limit, or in a group with one that is.
    pub fn skipped(&self) -> usize {
        self.skipped
    }

    /// Sequences cut at the limit.
    pub fn truncated(&self) -> usize {
        self.truncated
    }

    /// Names what training sees: the tokens, masks, columns and groups of all sequences in order, and whether they
    /// are shuffled. A checkpoint's data position is only good for the same.
    pub fn identity(&self) -> String {
        format!("{:032x}", self.identity)
    }

    /// An endless source of batches: epoch after epoch, each in an order of its own (if `shuffle`) that depends on
    /// `seed` and the epoch alone. A batch takes whole groups until it has `global_batch_size` sequences, and goes
    /// on into the next epoch where this one ends.
    ///
    /// # Errors
    /// `Config` if `global_batch_size` is 0; `Data` if no token of the file is scored.
    pub fn batches(self: &Arc<Self>, global_batch_size: usize, seed: u64) -> Result<EpochBatches> {
        EpochBatches::new(self.clone(), global_batch_size, seed)
    }

    /// The sequences in the file's order as one batch: all, or as many whole groups as `most` sequences hold (at
    /// least one).
    ///
    /// # Errors
    /// `Data` or `File` if the file changed since it was opened.
    pub fn all(&self, most: Option<usize>) -> Result<Batch> {
        let most = most.unwrap_or(usize::MAX);
        let (mut end, mut taken) = (0, 0);
        for group in 0..self.num_groups() {
            taken += self.group_size(group);
            if taken > most && end > 0 {
                break;
            }
            end = group + 1;
        }
        self.assemble(0..end)
    }

    /// The sequences in the file's order, in batches of whole groups of `batch_size` sequences (at least; the last
    /// may be short).
    pub fn in_order(&self, batch_size: usize) -> impl Iterator<Item = Result<Batch>> {
        let mut group = 0;
        std::iter::from_fn(move || {
            let first = group;
            let mut taken = 0;
            while group < self.num_groups() && (taken < batch_size || group == first) {
                taken += self.group_size(group);
                group += 1;
            }
            (group > first).then(|| self.assemble(first..group))
        })
    }

    fn num_groups(&self) -> usize {
        self.groups.len() - 1
    }

    /// Sequences of a group.
    fn group_size(&self, group: usize) -> usize {
        let records = &self.records[self.groups[group]..self.groups[group + 1]];
        records.iter().map(|record| record.num_sequences).sum()
    }

    /// The sequences of a line, from memory or else from the file.
    fn samples<'a>(&'a self, record: &'a Record) -> Result<Cow<'a, [Sample]>> {
        if let Some(samples) = &record.cached {
            return Ok(Cow::Borrowed(samples));
        }
        let place = Place {
            file: &self.path,
            line: record.line,
        };
        let changed = || {
            place
                .error("the file changed while it was in use")
                .help("train on a copy that stays as it is")
        };
        let mut bytes = vec![0; record.num_bytes];
        match self.file.read_exact_at(&mut bytes, record.offset) {
            Ok(()) => {}
            Err(cause) if cause.kind() == std::io::ErrorKind::UnexpectedEof => {
                return Err(changed());
            }
            Err(cause) => return Err(unreadable(&self.path, cause)),
        }
        if xxh3_64(&bytes) != record.hash {
            return Err(changed());
        }
        let line = self.reader.read(&bytes, place)?.ok_or_else(changed)?;
        Ok(Cow::Owned(line.samples))
    }
}

fn unreadable(path: &Path, cause: std::io::Error) -> Error {
    Error::new(ErrorKind::File, "read_data", "cannot read the data file")
        .with("file", path.display())
        .caused_by(cause)
}

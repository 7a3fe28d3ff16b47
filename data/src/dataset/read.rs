//! The one pass over a file when it is opened.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufRead, BufReader, Read},
    path::Path,
    time::{Duration, Instant},
};

use drivetrain_core::{Error, ErrorKind, Result, config::Overlong, files::open_regular};
use rayon::prelude::*;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::{Dataset, Record, schema::Schema, unreadable};
use crate::{
    DatasetOptions,
    line::{Line, LineReader, Place, Sample},
};

/// Lines, and about as many bytes, that are tokenized at once over all cores.
const CHUNK_LINES: usize = 4096;
const CHUNK_BYTES: usize = 8 << 20;
/// Longest line: a million ids in their longest form have room, and a file without line ends is told of before it
/// fills the memory.
const MAX_LINE_BYTES: u64 = 64 << 20;
/// Faulty lines that are told of at once.
const MOST_FAULTS: usize = 10;
const PROGRESS_EVERY: Duration = Duration::from_secs(5);

pub(super) fn open(path: &Path, options: &DatasetOptions) -> Result<Dataset> {
    let file = open_regular(path).map_err(|cause| unreadable(path, cause))?;
    let reader = LineReader::new(options);
    let mut collector = Collector::new(path, options);
    let mut lines = Lines {
        path,
        input: BufReader::with_capacity(1 << 20, &file),
        offset: 0,
        line: 0,
    };
    let size = file.metadata().map_or(0, |metadata| metadata.len());
    let mut told = Instant::now();
    let mut faults = Vec::new();
    while faults.len() < MOST_FAULTS {
        let chunk = lines.chunk()?;
        if chunk.is_empty() {
            break;
        }
        if told.elapsed() > PROGRESS_EVERY {
            told = Instant::now();
            let percent = 100 * lines.offset / size.max(1);
            tracing::info!(file = %path.display(), line = lines.line, percent, "reading the data");
        }
        let read = |raw: &RawLine| reader.read(&raw.bytes, raw.place(path));
        let read: Vec<_> = chunk.par_iter().map(read).collect();
        for (raw, line) in chunk.iter().zip(read) {
            let added = line.and_then(|line| line.map_or(Ok(()), |line| collector.add(raw, line)));
            match added {
                Ok(()) => {}
                Err(fault) if fault.kind() == ErrorKind::Data => faults.push(fault),
                Err(error) => return Err(error),
            }
        }
    }
    faults.truncate(MOST_FAULTS);
    if !faults.is_empty() {
        let first = faults.remove(0);
        return Err(first.and(faults));
    }
    let mut dataset = collector.finish(file, reader, options)?;
    dataset.records.shrink_to_fit();
    Ok(dataset)
}

/// A line as it is in the file.
struct RawLine {
    offset: u64,
    line: usize,
    bytes: Vec<u8>,
}

impl RawLine {
    fn place<'a>(&self, file: &'a Path) -> Place<'a> {
        Place {
            file,
            line: self.line,
        }
    }
}

struct Lines<'a> {
    path: &'a Path,
    input: BufReader<&'a File>,
    offset: u64,
    line: usize,
}

impl Lines<'_> {
    /// The next lines; none at the end of the file.
    fn chunk(&mut self) -> Result<Vec<RawLine>> {
        let (mut chunk, mut num_bytes) = (Vec::new(), 0);
        while chunk.len() < CHUNK_LINES && num_bytes < CHUNK_BYTES {
            let mut bytes = Vec::new();
            let count = (&mut self.input)
                .take(MAX_LINE_BYTES)
                .read_until(b'\n', &mut bytes)
                .map_err(|cause| unreadable(self.path, cause))?;
            if count == 0 {
                break;
            }
            self.line += 1;
            if count as u64 == MAX_LINE_BYTES {
                let place = Place {
                    file: self.path,
                    line: self.line,
                };
                return Err(place
                    .error("the line is too long")
                    .with("expected", format!("fewer than {MAX_LINE_BYTES} bytes"))
                    .help("jsonl has one object a line; give the document in several lines"));
            }
            chunk.push(RawLine {
                offset: self.offset,
                line: self.line,
                bytes,
            });
            self.offset += count as u64;
            num_bytes += count;
        }
        Ok(chunk)
    }
}

/// Lines become records, records become groups.
struct Collector<'a> {
    path: &'a Path,
    skip: bool,
    schema: Schema,
    records: Vec<Record>,
    groups: Vec<usize>,
    open: OpenGroup,
    /// The last line of every group that has a key.
    ended: BTreeMap<u128, usize>,
    /// Whether lines say their group; unknown before the first.
    grouped: Option<(bool, usize)>,
    cache_left: usize,
    num_lines: usize,
    num_sequences: usize,
    skipped: usize,
    truncated: usize,
    identity: Xxh3,
}

/// The group that the last lines were of.
#[derive(Default)]
struct OpenGroup {
    key: Option<u128>,
    overlong: bool,
    hashes: Vec<u128>,
}

impl<'a> Collector<'a> {
    fn new(path: &'a Path, options: &DatasetOptions) -> Self {
        Self {
            path,
            skip: options.overlong == Overlong::Skip,
            schema: Schema::default(),
            records: Vec::new(),
            groups: vec![0],
            open: OpenGroup::default(),
            ended: BTreeMap::new(),
            grouped: None,
            cache_left: options.cache_bytes,
            num_lines: 0,
            num_sequences: 0,
            skipped: 0,
            truncated: 0,
            identity: Xxh3::new(),
        }
    }

    fn add(&mut self, raw: &RawLine, line: Line) -> Result<()> {
        let place = raw.place(self.path);
        self.num_lines += 1;
        self.check_grouped(&line, place)?;
        if line.group.is_none() || line.group != self.open.key {
            self.close_group();
            if let Some(earlier) = line.group.and_then(|key| self.ended.get(&key)) {
                return Err(place
                    .field_error("group", "the group was already over")
                    .with(
                        "expected",
                        format!("its lines in a row; the last was line {earlier}"),
                    ));
            }
            self.open.key = line.group;
        }
        let mut hasher = Xxh3::new();
        for sample in &line.samples {
            self.schema.admit(sample, place)?;
            sample.hash(&mut hasher);
        }
        if let Some(key) = line.group {
            self.ended.insert(key, raw.line);
        }
        self.open.hashes.push(hasher.digest128());
        self.open.overlong |= line.num_overlong > 0;
        if !self.skip {
            self.truncated += line.num_overlong;
        }
        let needed = num_bytes(&line.samples);
        let keep = self.cache_left >= needed;
        if keep {
            self.cache_left -= needed;
        }
        self.records.push(Record {
            offset: raw.offset,
            num_bytes: raw.bytes.len(),
            hash: xxh3_64(&raw.bytes),
            line: raw.line,
            num_sequences: line.samples.len(),
            scored: line.samples.iter().any(Sample::is_any_scored),
            cached: keep.then_some(line.samples),
        });
        Ok(())
    }

    /// A pair is a group by itself; other lines all say their group, or none does.
    fn check_grouped(&mut self, line: &Line, place: Place<'_>) -> Result<()> {
        if line.samples.len() > 1 {
            return Ok(());
        }
        let says = line.group.is_some();
        let (first, at) = *self.grouped.get_or_insert((says, place.line));
        if says == first {
            return Ok(());
        }
        let word = |says| if says { "a group" } else { "no group" };
        Err(place
            .field_error("group", "some lines say their group and some do not")
            .with("expected", format!("{}, as line {at}", word(first)))
            .with("found", word(says)))
    }

    fn close_group(&mut self) {
        let start = self.groups[self.groups.len() - 1];
        let group = std::mem::take(&mut self.open);
        if self.records.len() == start {
            return;
        }
        let num_sequences = self.records[start..]
            .iter()
            .map(|r| r.num_sequences)
            .sum::<usize>();
        if self.skip && group.overlong {
            self.skipped += num_sequences;
            let freed = self
                .records
                .drain(start..)
                .filter_map(|record| record.cached);
            self.cache_left += freed.map(|samples| num_bytes(&samples)).sum::<usize>();
            return;
        }
        self.num_sequences += num_sequences;
        self.groups.push(self.records.len());
        self.identity.update(&group.hashes.len().to_le_bytes());
        for hash in group.hashes {
            self.identity.update(&hash.to_le_bytes());
        }
    }

    fn finish(
        mut self,
        file: File,
        reader: LineReader,
        options: &DatasetOptions,
    ) -> Result<Dataset> {
        self.close_group();
        if self.records.is_empty() {
            let message = match self.num_lines {
                0 => "the data file has no lines",
                _ => "every sequence of the data file is over the limit",
            };
            return Err(Error::new(ErrorKind::Data, "read_data", message)
                .with("file", self.path.display())
                .with("lines", self.num_lines)
                .with("skipped", self.skipped)
                .with("limit", format!("{} tokens", options.max_length)));
        }
        self.identity.update(&[u8::from(options.shuffle)]);
        tracing::info!(
            file = %self.path.display(),
            sequences = self.num_sequences,
            skipped = self.skipped,
            truncated = self.truncated,
            "read the data"
        );
        Ok(Dataset {
            path: self.path.to_owned(),
            file,
            reader,
            records: self.records,
            groups: self.groups,
            schema: self.schema,
            num_sequences: self.num_sequences,
            skipped: self.skipped,
            truncated: self.truncated,
            shuffle: options.shuffle,
            identity: self.identity.digest128(),
        })
    }
}

fn num_bytes(samples: &[Sample]) -> usize {
    samples.iter().map(Sample::num_bytes).sum()
}

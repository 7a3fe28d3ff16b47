//! `metrics.jsonl`: one JSON object a step, a line each, on disk as soon as the step is done.
//!
//! Every object has the key `step` (committed steps, so that of the first is 1); one with the key `skipped` is the
//! record of an attempt at a step, and an attempt that was skipped repeats the step before it. Keys stand in the order the
//! record declares them. JSON has no NaN: a [`JsonRecord`] writes a value that is not finite as `null`, and
//! says what it was under `non_finite`, its last key:
//! `{"loss":null,"grad_norm":0.1,"non_finite":{"loss":"NaN"}}`.

use std::{
    fs::{File, OpenOptions},
    io::{BufRead, BufReader, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use serde::{Serialize, Serializer};
use serde_json::{Map, Value};

use super::Metrics;
use crate::{Error, ErrorKind, Result};

/// Appends to a file of one JSON object a step.
#[derive(Debug)]
pub struct JsonlWriter {
    path: PathBuf,
    file: File,
    missing: u64,
}

/// What a run that goes on keeps of the lines before it; of [`Kept::default`], nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Kept {
    /// Committed steps.
    pub step: u64,
    /// Attempts at a step, skipped ones included.
    pub attempts: u64,
}

impl JsonlWriter {
    /// Opens the file, making it if it is missing. Lines after those of `kept`, and a last line that a kill cut
    /// short, are removed.
    ///
    /// # Errors
    /// `File` if it cannot be read or written, or if a line that would be kept is no object with a `step`.
    pub fn open(path: &Path, kept: Kept) -> Result<Self> {
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(|e| file_error("cannot open", path, e))?;
        let (keep, missing) = match kept {
            Kept { attempts: 0, .. } => (0, 0),
            kept => kept_bytes(&file, path, kept)?,
        };
        file.set_len(keep)
            .and_then(|()| file.seek(SeekFrom::Start(keep)))
            .map_err(|e| file_error("cannot truncate", path, e))?;
        Ok(Self {
            path: path.to_owned(),
            file,
            missing,
        })
    }

    /// Attempts that were to be kept and are not in the file.
    pub fn missing(&self) -> u64 {
        self.missing
    }

    /// Writes a record's line in one write.
    ///
    /// # Errors
    /// `File`, such as a full disk; the line may then be cut short, and the next [`Self::open`] removes it.
    /// `Defect` if the record is no object with a `step`.
    pub fn write(&mut self, record: &impl Serialize) -> Result<()> {
        let value = serde_json::to_value(record).map_err(|e| not_a_step().caused_by(e))?;
        if step_of(value.as_object()).is_none() {
            return Err(not_a_step().with("found", value));
        }
        let mut line = value.to_string();
        line.push('\n');
        self.file
            .write_all(line.as_bytes())
            .and_then(|()| self.file.flush())
            .map_err(|e| file_error("cannot write to", &self.path, e))
    }
}

/// A JSON object being made, that names the numbers in it that are not finite.
#[derive(Debug, Default)]
pub struct JsonRecord {
    object: Map<String, Value>,
    non_finite: Map<String, Value>,
}

impl JsonRecord {
    /// Adds a number.
    pub fn number(&mut self, name: &str, value: f64) {
        if !value.is_finite() {
            self.non_finite
                .insert(name.to_owned(), value.to_string().into());
        }
        // `From<f64>` gives null where the number is not finite.
        self.value(name, value);
    }

    /// Adds anything else.
    pub fn value(&mut self, name: &str, value: impl Into<Value>) {
        self.object.insert(name.to_owned(), value.into());
    }

    /// The object.
    pub fn finish(mut self) -> Map<String, Value> {
        if !self.non_finite.is_empty() {
            self.value("non_finite", self.non_finite.clone());
        }
        self.object
    }
}

impl Metrics {
    /// Each metric's value by its name, in order. What is not finite is `null`, and named under `non_finite`.
    pub fn to_json(&self) -> Map<String, Value> {
        let mut json = JsonRecord::default();
        for (name, metric) in self.iter() {
            json.number(name, metric.value());
        }
        json.finish()
    }
}

impl Serialize for Metrics {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        self.to_json().serialize(serializer)
    }
}

/// Bytes of the leading lines that are kept, and the number of attempts that they lack.
fn kept_bytes(file: &File, path: &Path, kept: Kept) -> Result<(u64, u64)> {
    let mut reader = BufReader::new(file);
    let (mut keep, mut attempts) = (0, 0);
    let mut text = Vec::new();
    for number in 1.. {
        text.clear();
        let read = reader
            .read_until(b'\n', &mut text)
            .map_err(|e| file_error("cannot read", path, e))?;
        if text.last() != Some(&b'\n') {
            break;
        }
        let object: Option<Map<String, Value>> = serde_json::from_slice(&text).ok();
        let attempt = u64::from(object.as_ref().is_some_and(|o| o.contains_key("skipped")));
        match step_of(object.as_ref()) {
            Some(found) if found <= kept.step && attempts + attempt <= kept.attempts => {
                keep += read as u64;
                attempts += attempt;
            }
            Some(_) => break,
            None => {
                return Err(Error::new(
                    ErrorKind::File,
                    "open_metrics",
                    "a line is not an object with a `step`",
                )
                .with("file", path.display())
                .with("line", number)
                .help("move the file away to start a new one"));
            }
        }
    }
    Ok((keep, kept.attempts - attempts))
}

fn step_of(object: Option<&Map<String, Value>>) -> Option<u64> {
    object?.get("step")?.as_u64()
}

fn not_a_step() -> Error {
    Error::new(
        ErrorKind::Defect,
        "write_metrics",
        "a record must be an object with a `step`",
    )
}

fn file_error(what: &str, path: &Path, source: std::io::Error) -> Error {
    Error::new(
        ErrorKind::File,
        "write_metrics",
        format!("{what} the metrics file"),
    )
    .with("file", path.display())
    .caused_by(source)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Serialize)]
    struct Record {
        step: u64,
        skipped: bool,
        #[serde(flatten)]
        metrics: Metrics,
        seconds: f64,
    }

    fn record(step: u64, loss: f64) -> Record {
        let mut metrics = Metrics::default();
        metrics.mean("loss", loss, 1.0);
        metrics.sum("grad_norm", 0.1);
        Record {
            step,
            skipped: false,
            metrics,
            seconds: 9.0,
        }
    }

    /// A run without a skipped step.
    fn through(step: u64) -> Kept {
        Kept {
            step,
            attempts: step,
        }
    }

    #[test]
    fn lines_keep_their_order_and_name_what_is_not_finite() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut writer = JsonlWriter::open(&path, Kept::default()).unwrap();
        writer.write(&record(1, 2.5)).unwrap();
        writer.write(&record(2, f64::NAN)).unwrap();
        writer.write(&record(3, f64::NEG_INFINITY)).unwrap();
        let expected = concat!(
            "{\"step\":1,\"skipped\":false,\"loss\":2.5,\"grad_norm\":0.1,\"seconds\":9.0}\n",
            "{\"step\":2,\"skipped\":false,\"loss\":null,\"grad_norm\":0.1,\"non_finite\":{\"loss\":\"NaN\"},\"seconds\":9.0}\n",
            "{\"step\":3,\"skipped\":false,\"loss\":null,\"grad_norm\":0.1,\"non_finite\":{\"loss\":\"-inf\"},\"seconds\":9.0}\n",
        );
        assert_eq!(std::fs::read_to_string(&path).unwrap(), expected);
    }

    #[test]
    fn resuming_removes_later_steps_and_a_torn_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut writer = JsonlWriter::open(&path, Kept::default()).unwrap();
        for step in 1..=4 {
            writer.write(&record(step, step as f64)).unwrap();
        }
        let whole = std::fs::read_to_string(&path).unwrap();
        for (resumed, torn) in [(2, ""), (4, "{\"step\":5,\"lo"), (0, "")] {
            std::fs::write(&path, format!("{whole}{torn}")).unwrap();
            let mut writer = JsonlWriter::open(&path, through(resumed)).unwrap();
            writer.write(&record(resumed + 1, 77.0)).unwrap();
            let text = std::fs::read_to_string(&path).unwrap();
            let lines: Vec<_> = text.lines().collect();
            assert_eq!(lines.len() as u64, resumed + 1);
            assert!(whole.starts_with(&lines[..resumed as usize].join("\n")));
            assert!(lines[resumed as usize].contains("77.0"), "{text}");
        }
    }

    /// A skipped attempt repeats the step before it: it is kept if it came before the checkpoint, and only then.
    #[test]
    fn a_skipped_attempt_is_kept_or_removed_by_its_number() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let lines = [
            r#"{"step":1,"skipped":false}"#,
            r#"{"step":1,"validation_loss":3.5}"#,
            r#"{"step":1,"skipped":true}"#,
            r#"{"step":2,"skipped":false}"#,
        ];
        let cases = [
            (1, 1, 2, 0),
            (1, 2, 3, 0),
            (2, 3, 4, 0),
            (4, 6, 4, 3),
            (0, 1, 0, 1),
        ];
        for (step, attempts, left, missing) in cases {
            std::fs::write(&path, lines.join("\n") + "\n").unwrap();
            let writer = JsonlWriter::open(&path, Kept { step, attempts }).unwrap();
            let text = std::fs::read_to_string(&path).unwrap();
            assert_eq!(text.lines().collect::<Vec<_>>(), lines[..left]);
            assert_eq!(writer.missing(), missing, "{step} {attempts}");
        }
    }

    #[test]
    fn a_line_that_is_no_step_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        std::fs::write(&path, "{\"step\":1}\nhello\n{\"step\":2}\n").unwrap();
        let error = JsonlWriter::open(&path, through(5)).unwrap_err();
        assert_eq!(
            (error.kind(), error.context("line")),
            (ErrorKind::File, Some("2"))
        );
        assert!(error.context("file").unwrap().ends_with("metrics.jsonl"));
    }

    #[test]
    fn what_cannot_be_written_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("no").join("metrics.jsonl");
        let error = JsonlWriter::open(&missing, Kept::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::File);
        let mut writer =
            JsonlWriter::open(&folder.path().join("metrics.jsonl"), Kept::default()).unwrap();
        let error = writer.write(&Metrics::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Defect);
    }
}

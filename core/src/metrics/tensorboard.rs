//! TensorBoard event files: scalars by step, as TensorBoard 2 reads them.
//!
//! A file is a row of records (length, its checksum, data, its checksum: CRC-32C, masked as TFRecord does), each an
//! `Event` message (tensorflow/core/util/event.proto). A run that goes on adds a file, which begins with the start of a
//! session at its first step: TensorBoard then drops what an earlier file has of this step and later ones.

use std::{
    fs::{File, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use prost::Message;
use serde_json::{Map, Value};

use crate::{Error, ErrorKind, Result};

/// What TensorBoard takes for an event file.
const PREFIX: &str = "events.out.tfevents.";

#[derive(Clone, PartialEq, Message)]
struct Event {
    #[prost(double, tag = "1")]
    wall_time: f64,
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(oneof = "What", tags = "3, 5, 7")]
    what: Option<What>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum What {
    #[prost(string, tag = "3")]
    FileVersion(String),
    #[prost(message, tag = "5")]
    Summary(Summary),
    #[prost(message, tag = "7")]
    Session(Session),
}

#[derive(Clone, PartialEq, Message)]
struct Summary {
    #[prost(message, repeated, tag = "1")]
    values: Vec<Scalar>,
}

#[derive(Clone, PartialEq, Message)]
struct Scalar {
    #[prost(string, tag = "1")]
    tag: String,
    // Optional, so that a 0 is written: without its number a value is of no kind.
    #[prost(float, optional, tag = "2")]
    number: Option<f32>,
}

#[derive(Clone, PartialEq, Message)]
struct Session {
    #[prost(int32, tag = "1")]
    status: i32,
}

/// `SessionLog.START`.
const START: i32 = 1;

/// Appends scalars to an event file of its own.
#[derive(Debug)]
pub struct EventWriter {
    path: PathBuf,
    file: File,
}

impl EventWriter {
    /// Starts a file in this folder. A run that goes on after `step` adds it to those that are there; of another,
    /// `None`, they are removed.
    ///
    /// # Errors
    /// `File` naming the path.
    pub fn create(folder: &Path, step: Option<u64>) -> Result<Self> {
        let fail = |path: &Path, cause| file_error(path, cause);
        std::fs::create_dir_all(folder).map_err(|e| fail(folder, e))?;
        let mut old = Vec::new();
        for entry in std::fs::read_dir(folder).map_err(|e| fail(folder, e))? {
            let path = entry.map_err(|e| fail(folder, e))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with(PREFIX) {
                old.push(path);
            }
        }
        if step.is_none() {
            for path in old.drain(..) {
                std::fs::remove_file(&path).map_err(|e| fail(&path, e))?;
            }
        }
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let host = match host.trim() {
            "" => "localhost",
            host => host,
        };
        // TensorBoard reads files in the order of their names.
        let name = format!("{PREFIX}{:010}.{:04}.{host}", now() as u64, old.len());
        let path = folder.join(name);
        let file = OpenOptions::new().append(true).create_new(true).open(&path);
        let file = file.map_err(|e| fail(&path, e))?;
        let mut writer = Self { path, file };
        writer.write(0, What::FileVersion("brain.Event:2".to_owned()))?;
        if let Some(step) = step {
            writer.write(step + 1, What::Session(Session { status: START }))?;
        }
        Ok(writer)
    }

    /// Adds the scalars of a step, in one write.
    ///
    /// # Errors
    /// `File`, such as a full disk.
    pub fn scalars(
        &mut self,
        step: u64,
        scalars: impl IntoIterator<Item = (String, f64)>,
    ) -> Result<()> {
        let values = scalars.into_iter().map(|(tag, number)| Scalar {
            tag,
            number: Some(number as f32),
        });
        self.write(
            step,
            What::Summary(Summary {
                values: values.collect(),
            }),
        )
    }

    fn write(&mut self, step: u64, what: What) -> Result<()> {
        let event = Event {
            wall_time: now(),
            step: step as i64,
            what: Some(what),
        };
        let record = record(&event.encode_to_vec());
        self.file
            .write_all(&record)
            .map_err(|e| file_error(&self.path, e))
    }
}

/// The numbers of a line of metrics, by their path (`metrics/entropy`), but for the step. What is not finite, and so
/// `null` there, is the number that it was.
pub fn scalars(line: &Map<String, Value>) -> Vec<(String, f64)> {
    let mut found = Vec::new();
    collect("", line, &mut found);
    found.retain(|(tag, _)| tag != "step");
    found
}

fn collect(path: &str, object: &Map<String, Value>, found: &mut Vec<(String, f64)>) {
    for (key, value) in object {
        let tag = format!("{path}{key}");
        match value {
            Value::Object(names) if key == "non_finite" => {
                let numbers = names.iter().filter_map(|(name, text)| {
                    let number = text.as_str()?.parse().ok()?;
                    Some((format!("{path}{name}"), number))
                });
                found.extend(numbers);
            }
            Value::Object(inner) => collect(&format!("{tag}/"), inner, found),
            // By rank.
            Value::Array(ranks) => {
                for (rank, value) in ranks.iter().enumerate() {
                    let inner = value.as_object();
                    inner
                        .into_iter()
                        .for_each(|o| collect(&format!("{tag}/{rank}/"), o, found));
                }
            }
            Value::Bool(flag) => found.push((tag, f64::from(*flag))),
            Value::Number(number) => found.extend(number.as_f64().map(|n| (tag, n))),
            Value::Null | Value::String(_) => {}
        }
    }
}

fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let sum = |bytes: &[u8]| masked(bytes).to_le_bytes();
    [&length[..], &sum(&length), data, &sum(data)].concat()
}

/// A checksum as TFRecord stores it, so that one of data that holds checksums is still good.
fn masked(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes)
        .rotate_right(15)
        .wrapping_add(0xa282_ead8)
}

/// Seconds since 1970.
fn now() -> f64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default().as_secs_f64()
}

fn file_error(path: &Path, cause: std::io::Error) -> Error {
    let message = "cannot write the TensorBoard event file";
    Error::new(ErrorKind::File, "write_metrics", message)
        .with("file", path.display())
        .caused_by(cause)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every event of a folder, file by file, its checksums checked.
    fn events(folder: &Path) -> Vec<Vec<Event>> {
        let mut paths: Vec<_> = (std::fs::read_dir(folder).unwrap())
            .map(|entry| entry.unwrap().path())
            .collect();
        paths.sort();
        let read = |path: &PathBuf| {
            let bytes = std::fs::read(path).unwrap();
            let (mut rest, mut events) = (&bytes[..], Vec::new());
            while !rest.is_empty() {
                let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap());
                assert_eq!(number(&rest[8..12]), masked(&rest[..8]));
                let len = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
                let data = &rest[12..12 + len];
                assert_eq!(number(&rest[12 + len..16 + len]), masked(data));
                events.push(Event::decode(data).unwrap());
                rest = &rest[16 + len..];
            }
            events
        };
        paths.iter().map(read).collect()
    }

    #[test]
    fn the_checksum_is_that_of_the_format() {
        // The check value of CRC-32C; masked by the rule of TFRecord's documentation, by hand.
        assert_eq!(crc32c::crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(masked(b"123456789"), 0xc78a_b0e5);
    }

    #[test]
    fn a_scalar_is_the_bytes_that_the_format_says() {
        let event = Event {
            wall_time: 1.0,
            step: 3,
            what: Some(What::Summary(Summary {
                values: vec![Scalar {
                    tag: "a".to_owned(),
                    number: Some(0.0),
                }],
            })),
        };
        let expected = [
            &[0x09][..],
            &1f64.to_le_bytes(),
            &[0x10, 3],                                            // wall_time, step
            &[0x2a, 10, 0x0a, 8, 0x0a, 1, b'a', 0x15, 0, 0, 0, 0], // summary { value { tag, simple_value } }
        ];
        assert_eq!(event.encode_to_vec(), expected.concat());
    }

    #[test]
    fn a_run_that_goes_on_adds_a_file_and_another_replaces_all() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("tensorboard");
        let scalars = |writer: &mut EventWriter, step: u64| {
            let loss = ("loss".to_owned(), step as f64 / 2.0);
            writer
                .scalars(step, [loss, ("nan".to_owned(), f64::NAN)])
                .unwrap();
        };
        let mut writer = EventWriter::create(&folder, None).unwrap();
        (0..4).for_each(|step| scalars(&mut writer, step));
        let mut writer = EventWriter::create(&folder, Some(2)).unwrap();
        scalars(&mut writer, 3);
        std::fs::write(folder.join("notes.txt"), "").unwrap();
        std::fs::remove_file(folder.join("notes.txt")).unwrap();
        let found = events(&folder);
        assert_eq!(found.iter().map(Vec::len).collect::<Vec<_>>(), [5, 3]);
        let version = Some(What::FileVersion("brain.Event:2".to_owned()));
        assert!(found.iter().all(|events| events[0].what == version));
        assert_eq!(
            found[1][1].what,
            Some(What::Session(Session { status: START }))
        );
        assert_eq!(found[1][1].step, 3);
        let Some(What::Summary(summary)) = &found[0][4].what else {
            panic!("{:?}", found[0][4])
        };
        assert_eq!((found[0][4].step, summary.values[0].number), (3, Some(1.5)));
        assert!(summary.values[1].number.unwrap().is_nan());
        EventWriter::create(&folder, None).unwrap();
        assert_eq!(events(&folder).len(), 1);
    }

    #[test]
    fn every_number_of_a_line_has_a_tag() {
        let line = serde_json::json!({
            "step": 3, "skipped": true, "loss": null, "mfu": null, "metrics": { "entropy": 0.5 },
            "memory": [{ "resident": 7 }, { "resident": 8 }], "text": "x", "non_finite": { "loss": "-inf" },
        });
        let expected = [
            ("skipped", 1.0),
            ("metrics/entropy", 0.5),
            ("memory/0/resident", 7.0),
            ("memory/1/resident", 8.0),
            ("loss", f64::NEG_INFINITY),
        ];
        let expected: Vec<_> = expected
            .map(|(tag, number)| (tag.to_owned(), number))
            .into();
        assert_eq!(scalars(line.as_object().unwrap()), expected);
    }

    #[test]
    fn a_place_that_cannot_be_written_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        let error = EventWriter::create(&file, None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::File);
        assert!(error.context("file").unwrap().ends_with("file"));
    }
}

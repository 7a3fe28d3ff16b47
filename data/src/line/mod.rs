//! From a line to sequences.

mod columns;
mod fields;
mod json;
mod place;
mod sample;

use drivetrain_core::{Result, config::Overlong};
use xxhash_rust::xxh3::xxh3_128;

use crate::{DatasetOptions, text::LazyText};
pub(crate) use json::{Fields, Json};
pub(crate) use place::Place;
pub(crate) use sample::{ColumnValue, Sample};

/// What a line holds.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Line {
    /// One, or the two of a pair: a group.
    pub(crate) samples: Vec<Sample>,
    /// Key of the group it says it is in.
    pub(crate) group: Option<u128>,
    /// Samples over the limit; cut where the policy is to cut.
    pub(crate) num_overlong: usize,
}

/// Reads lines.
#[derive(Debug)]
pub(crate) struct LineReader {
    vocab_size: usize,
    max_length: usize,
    overlong: Overlong,
    text: LazyText,
}

impl LineReader {
    pub(crate) fn new(options: &DatasetOptions) -> Self {
        Self {
            vocab_size: options.vocab_size,
            max_length: options.max_length,
            overlong: options.overlong,
            text: LazyText::new(&options.tokenizer),
        }
    }

    /// Reads a line; none where it is blank.
    ///
    /// # Errors
    /// `Data` naming file, line, field and position.
    pub(crate) fn read(&self, bytes: &[u8], place: Place<'_>) -> Result<Option<Line>> {
        let Some(mut fields) = parse(bytes, place)? else {
            return Ok(None);
        };
        let group = match fields.shift_remove("group") {
            None => None,
            Some(Json::Integer(id)) => Some(xxh3_128(&id.to_le_bytes())),
            Some(Json::Text(id)) => Some(xxh3_128(id.as_bytes())),
            Some(other) => return Err(place.type_error("group", "a number or a string", &other)),
        };
        let is_pair = fields.contains_key("chosen") || fields.contains_key("rejected");
        if is_pair && group.is_some() {
            return Err(place.field_error("group", "a pair is a group of its own"));
        }
        let mut samples = fields::read(fields, self.vocab_size, &self.text, place)?;
        let mut num_overlong = 0;
        for sample in &mut samples {
            num_overlong += usize::from(self.limit(sample, place)?);
        }
        Ok(Some(Line {
            samples,
            group,
            num_overlong,
        }))
    }

    /// Whether the sample is over the limit.
    fn limit(&self, sample: &mut Sample, place: Place<'_>) -> Result<bool> {
        if sample.tokens.len() <= self.max_length {
            return Ok(false);
        }
        match self.overlong {
            Overlong::Error => {
                return Err(place
                    .error("the sequence is longer than the limit")
                    .with("expected", format!("at most {} tokens", self.max_length))
                    .with("found", format!("{} tokens", sample.tokens.len()))
                    .help(
                        "set data.overlong to skip or truncate, or raise data.max_length as far as \
                         the model's max_position_embeddings goes",
                    ));
            }
            Overlong::Skip => {}
            Overlong::Truncate => sample.truncate(self.max_length),
        }
        Ok(true)
    }
}

fn parse(bytes: &[u8], place: Place<'_>) -> Result<Option<Fields>> {
    let bytes = match place.line {
        1 => bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes),
        _ => bytes,
    };
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Ok(None);
    }
    let text = std::str::from_utf8(bytes).map_err(|cause| {
        place
            .error("the line is not UTF-8")
            .with("byte", cause.valid_up_to() + 1)
            .help("save the file as UTF-8")
    })?;
    match serde_json::from_str(text) {
        Ok(Json::Object(fields)) => Ok(Some(fields)),
        Ok(other) => Err(place
            .error("the line is not a JSON object")
            .with("found", other.describe())
            .help("each line is an object of its own, such as {\"text\": \"...\"}")),
        Err(cause) => Err(place
            .error("the line is not valid JSON")
            .with("column", cause.column())
            .with("found", json_fault(&cause))),
    }
}

/// What serde_json says, less the place: its line is counted within the line.
fn json_fault(cause: &serde_json::Error) -> String {
    let text = cause.to_string();
    match text.rsplit_once(" at line ") {
        Some((fault, _)) => fault.to_owned(),
        None => text,
    }
}

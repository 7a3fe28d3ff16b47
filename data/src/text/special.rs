//! The special tokens that a folder declares.

use std::{collections::BTreeMap, path::Path};

use drivetrain_core::{Error, ErrorKind, Result, files};
use serde_json::{Map, Value};

/// Largest `tokenizer_config.json` or chat template.
const MAX_TEXT_FILE_BYTES: u64 = 64 << 20;

/// Bos, eos and the like, by their names in `tokenizer_config.json`.
#[derive(Debug, Default)]
pub(super) struct SpecialTokens {
    /// `bos_token` and so on: the token's text.
    pub(super) texts: BTreeMap<String, String>,
    eos_id: Option<u32>,
}

impl SpecialTokens {
    /// Reads `special_tokens_map.json`, `tokenizer_config.json` and `config.json`, those that are there; what a
    /// later one says of a token counts.
    pub(super) fn open(folder: &Path) -> Result<Self> {
        let mut special = Self::default();
        for name in ["special_tokens_map.json", "tokenizer_config.json"] {
            let Some(object) = read_object(&folder.join(name))? else {
                continue;
            };
            for (key, value) in &object {
                let text = match value {
                    Value::String(text) => Some(text.as_str()),
                    Value::Object(token) => token.get("content").and_then(Value::as_str),
                    _ => None,
                };
                if let (true, Some(text)) = (key.ends_with("_token"), text) {
                    special.texts.insert(key.clone(), text.to_owned());
                }
            }
        }
        let config = read_object(&folder.join("config.json"))?.unwrap_or_default();
        let eos = match config.get("eos_token_id") {
            Some(Value::Array(ids)) => ids.first().and_then(Value::as_u64),
            Some(id) => id.as_u64(),
            None => None,
        };
        special.eos_id = eos.and_then(|id| u32::try_from(id).ok());
        Ok(special)
    }

    /// The end-of-sequence token: the tokenizer's, or else the model's.
    pub(super) fn eos_id(&self, id_of: impl Fn(&str) -> Option<u32>) -> Option<u32> {
        let declared = self.texts.get("eos_token").and_then(|text| id_of(text));
        declared.or(self.eos_id)
    }
}

/// A JSON object; none where the file is not there.
pub(super) fn read_object(path: &Path) -> Result<Option<Map<String, Value>>> {
    let Some(text) = read_text(path)? else {
        return Ok(None);
    };
    serde_json::from_str(&text).map(Some).map_err(|cause| {
        Error::new(
            ErrorKind::File,
            "read_tokenizer",
            "the file is not a JSON object",
        )
        .with("file", path.display())
        .caused_by(cause)
    })
}

/// A text file; none where it is not there.
pub(super) fn read_text(path: &Path) -> Result<Option<String>> {
    match files::read_text(path, MAX_TEXT_FILE_BYTES) {
        Ok(text) => Ok(Some(text)),
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(cause) => Err(
            Error::new(ErrorKind::File, "read_tokenizer", "cannot read the file")
                .with("file", path.display())
                .caused_by(cause),
        ),
    }
}

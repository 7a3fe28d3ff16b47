//! Typed access to a config's keys, with errors that name file and key.

use std::{fmt::Display, path::Path};

use serde_json::{Map, Value};

use crate::{Error, ErrorKind, Result};

/// A JSON object of a config file.
#[derive(Clone, Copy)]
pub(super) struct Keys<'a> {
    map: &'a Map<String, Value>,
    path: &'a Path,
    /// The key that holds this object; empty for the whole file.
    parent: &'a str,
}

impl<'a> Keys<'a> {
    pub(super) fn new(map: &'a Map<String, Value>, path: &'a Path) -> Self {
        let parent = "";
        Self { map, path, parent }
    }

    /// The object under a key of the whole file; `None` if absent, null or empty.
    pub(super) fn object(&self, key: &'a str) -> Result<Option<Keys<'a>>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Object(map)) if map.is_empty() => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Keys {
                map,
                path: self.path,
                parent: key,
            })),
            Some(other) => Err(self.invalid(key, other, "an object or null")),
        }
    }

    /// The value of a key, unless it is absent or null.
    pub(super) fn value(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    /// Whether the key is there and null.
    pub(super) fn is_null(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(Value::is_null)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&'a String, &'a Value)> + use<'a> {
        self.map.iter()
    }

    /// A count from 1 to `max`, or the default where the key is absent or null.
    pub(super) fn size(&self, key: &str, default: usize, max: usize) -> Result<usize> {
        Ok(self.optional_size(key, 1, max)?.unwrap_or(default))
    }

    /// A count from `min` to `max`; `None` where the key is absent or null.
    pub(super) fn optional_size(&self, key: &str, min: usize, max: usize) -> Result<Option<usize>> {
        self.value(key)
            .map(|value| self.size_of(key, value, min, max))
            .transpose()
    }

    /// A value, perhaps inside an array, as a count.
    pub(super) fn size_of(
        &self,
        key: &str,
        value: &Value,
        min: usize,
        max: usize,
    ) -> Result<usize> {
        let size = value.as_u64().and_then(|n| usize::try_from(n).ok());
        size.filter(|n| (min..=max).contains(n))
            .ok_or_else(|| self.invalid(key, value, &format!("a whole number from {min} to {max}")))
    }

    /// A finite number; `None` where the key is absent or null.
    pub(super) fn number(&self, key: &str) -> Result<Option<f64>> {
        self.value(key)
            .map(|value| {
                (value.as_f64().filter(|v| v.is_finite()))
                    .ok_or_else(|| self.invalid(key, value, "a finite number"))
            })
            .transpose()
    }

    /// A number above 0; without a default the key is required.
    pub(super) fn positive(&self, key: &str, default: Option<f64>) -> Result<f64> {
        match self.number(key)?.or(default) {
            Some(value) if value > 0.0 => Ok(value),
            // As Rust writes it: with an exponent where there would be hundreds of digits.
            Some(value) => Err(self.invalid(key, format!("{value:?}"), "a number above 0")),
            None => Err(self.invalid(key, "nothing", "a number above 0")),
        }
    }

    pub(super) fn flag(&self, key: &str, default: bool) -> Result<bool> {
        match self.value(key) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.invalid(key, other, "true or false")),
        }
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.invalid(key, other, "a string")),
        }
    }

    pub(super) fn list(&self, key: &str) -> Result<Option<&'a Vec<Value>>> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(other) => Err(self.invalid(key, other, "a list")),
        }
    }

    /// The file contradicts itself or the format.
    pub(super) fn invalid(&self, key: &str, found: impl Display, expected: &str) -> Error {
        let message = "the model's config is inconsistent";
        self.error(ErrorKind::File, message, key, found)
            .with("expected", expected)
            .help("correct the model's config.json, or take it from where the weights came from")
    }

    /// The file is fine, and we do not compute this.
    pub(super) fn unsupported(&self, key: &str, found: impl Display, supported: &str) -> Error {
        let message = "the model needs what we do not support";
        self.error(ErrorKind::Unsupported, message, key, found)
            .with("supported", supported)
    }

    fn error(&self, kind: ErrorKind, message: &str, key: &str, found: impl Display) -> Error {
        let key = match self.parent {
            "" => key.to_owned(),
            parent => format!("{parent}.{key}"),
        };
        let mut found = found.to_string();
        if let Some((cut, _)) = found.char_indices().nth(200) {
            found.truncate(cut);
            found.push('…');
        }
        Error::new(kind, "read_model_config", message)
            .with("file", self.path.display())
            .with("key", key)
            .with("found", found)
    }
}

//! Where in the data something is.

use std::path::Path;

use drivetrain_core::{Error, ErrorKind};

use super::json::Json;

/// A line of a file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place<'a> {
    pub(crate) file: &'a Path,
    /// Counted from 1.
    pub(crate) line: usize,
}

impl Place<'_> {
    /// `file:line`.
    pub(crate) fn location(&self) -> String {
        format!("{}:{}", self.file.display(), self.line)
    }

    /// An error of kind `Data` at this line.
    pub(crate) fn error(&self, message: impl Into<String>) -> Error {
        Error::new(ErrorKind::Data, "read_data", message).with("location", self.location())
    }

    /// An error about one field.
    pub(crate) fn field_error(&self, field: &str, message: impl Into<String>) -> Error {
        self.error(message).with("field", field)
    }

    /// A field of the wrong type.
    pub(crate) fn type_error(&self, field: &str, expected: &str, found: &Json) -> Error {
        self.field_error(field, "the field has the wrong type")
            .with("expected", expected)
            .with("found", found.describe())
    }
}

//! What programs read: JSON on stdout.

use crate::core::{Error, ErrorKind, Result};
use serde::Serialize;

/// Prints a value as one line of JSON.
pub(super) fn json(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string(value).map_err(|cause| {
        Error::new(
            ErrorKind::Defect,
            "print_json",
            "a result cannot be written as JSON",
        )
        .caused_by(cause)
    })?;
    println!("{text}");
    Ok(())
}

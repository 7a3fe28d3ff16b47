//! What the program writes, and where it must not.

use std::{
    fmt::Display,
    io::{ErrorKind::BrokenPipe, Write},
    path::Path,
};

use crate::core::{Error, ErrorKind, Result, files::real};
use serde::Serialize;

/// Prints a line on stdout. A reader that has left (`| head`) is no fault: what was asked for is done all the same.
pub(super) fn line(text: impl Display) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(cause) if cause.kind() != BrokenPipe => {
            let message = "cannot write to standard output";
            Err(Error::new(ErrorKind::File, "print", message).caused_by(cause))
        }
        _ => Ok(()),
    }
}

/// Prints a value as one line of JSON on stdout.
pub(super) fn json(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string(value).map_err(|cause| {
        Error::new(
            ErrorKind::Defect,
            "print_json",
            "a result cannot be written as JSON",
        )
        .caused_by(cause)
    })?;
    line(text)
}

/// Says something on stderr. Where that cannot be written there is nobody to tell.
pub(super) fn note(text: impl Display) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// Refuses an output that is something the command reads, or lies in a folder that it reads.
pub(super) fn spare(option: &str, out: &Path, inputs: &[(&str, &Path)]) -> Result<()> {
    let place = real(out);
    for (what, input) in inputs {
        let input = real(input);
        if place == input || input.is_dir() && place.starts_with(&input) {
            let message = format!("{option} would write over {what}");
            return Err(Error::new(ErrorKind::Config, "choose_output", message)
                .with("file", out.display())
                .help("choose another place"));
        }
    }
    Ok(())
}

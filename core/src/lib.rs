//! The training contract.
#![forbid(unsafe_code)]

mod error;

pub use error::{Diagnostic, Error, ErrorKind, Result, Severity};

//! libtorch's failures as the contract's errors.

use drivetrain_core::{Error, ErrorKind};
use tch::TchError;

/// What a call into libtorch returns, inside this crate.
pub(crate) type Torch<T> = Result<T, TchError>;

/// Turns a libtorch failure in `operation` into an [`Error`]; its C++ stack is left out.
pub(crate) fn torch(operation: &'static str) -> impl Fn(TchError) -> Error {
    move |cause| {
        let message = match &cause {
            TchError::Torch(text) => text.clone(),
            other => other.to_string(),
        };
        let first = message
            .lines()
            .take_while(|line| !line.starts_with("Exception raised from"))
            .collect::<Vec<_>>()
            .join(" ");
        Error::new(ErrorKind::Device, operation, format!("libtorch: {first}"))
    }
}

//! The built-in objectives as one closed set, chosen by the config.

use enum_dispatch::enum_dispatch;

use super::{Aggregation, Nll};
use crate::{
    Error, ErrorKind, Result,
    config::{ObjectiveConfig, ObjectiveKind},
};

/// A built-in objective. A user's own is a `dyn Objective`.
#[enum_dispatch(Objective)]
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum BuiltinObjective {
    /// Negative log-likelihood.
    Nll,
}

/// The objective that a config asks for.
///
/// # Errors
/// `Config` with every fault.
pub fn from_config(config: &ObjectiveConfig) -> Result<BuiltinObjective> {
    let temperature = config.temperature;
    match config.kind {
        ObjectiveKind::Nll => Ok(Nll {
            aggregation: Aggregation::from_config(config, Aggregation::TokenMean),
            temperature,
        }
        .into()),
        other => Err(Error::new(
            ErrorKind::Unsupported,
            "build_objective",
            format!("no built-in objective for {other:?}"),
        )),
    }
}

//! Weights in (a source) and out (a sink), parameter by parameter.

mod export;
mod import;

pub(crate) use export::{Export, export};
pub(crate) use import::read;

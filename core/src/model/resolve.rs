//! From what a config calls a model to the folder that holds it.

use std::{
    fmt,
    path::{Path, PathBuf},
};

use crate::{Error, ErrorKind, Result};

/// Finds the folder of a model: a path, or an id of some store.
pub trait ModelResolver: Send + Sync + fmt::Debug {
    /// The folder that holds `config.json` and the rest of `model`.
    ///
    /// # Errors
    /// `Config` if there is no such model; `File` if it cannot be had now. Each says what to do.
    fn resolve(&self, model: &str) -> Result<PathBuf>;
}

/// Knows folders only.
#[derive(Debug, Clone, Copy, Default)]
pub struct LocalModels;

impl ModelResolver for LocalModels {
    fn resolve(&self, model: &str) -> Result<PathBuf> {
        let folder = Path::new(model);
        if folder.is_dir() {
            return Ok(folder.to_owned());
        }
        Err(
            Error::new(ErrorKind::Config, "resolve_model", "no such model folder")
                .with("model", model)
                .help("give a folder that holds config.json and *.safetensors"),
        )
    }
}

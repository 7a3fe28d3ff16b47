//! Finds a libtorch that fits the pinned `tch`, or installs one in a per-user cache.
//!
//! Three sources, first match wins: the python package (`LIBTORCH_USE_PYTORCH`), a folder
//! (`LIBTORCH`), our own installation. The first two belong to the user and are only checked.

mod check;
mod install;
mod metadata;

use anyhow::Result;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The only libtorch that `tch` [`TCH_VERSION`] compiles against.
pub(crate) const TORCH_VERSION: &str = "2.11.0";
/// The `tch` that the workspace pins; a test compares it with the root manifest.
pub(crate) const TCH_VERSION: &str = "0.24.0";

/// A libtorch that was checked and may be compiled against.
#[derive(Debug)]
pub(crate) struct Libtorch {
    folder: PathBuf,
    source: Source,
}

#[derive(Debug, PartialEq, Eq)]
enum Source {
    /// The torch package of the python on the path; `torch-sys` asks that python itself.
    Python,
    /// A folder that the user named in `LIBTORCH`.
    Folder,
    /// Installed by us.
    Cache,
}

/// Returns a checked libtorch; installs one when neither `LIBTORCH` nor `LIBTORCH_USE_PYTORCH` is
/// set. `verify` hashes an existing installation of ours instead of comparing file sizes.
pub(crate) fn ensure(verify: bool) -> Result<Libtorch> {
    // The order in which torch-sys looks, too.
    if is_set("LIBTORCH_USE_PYTORCH") {
        let folder = check::python_package()?;
        return Ok(Libtorch {
            folder,
            source: Source::Python,
        });
    }
    if let Some(folder) = std::env::var_os("LIBTORCH").map(PathBuf::from) {
        check::folder(&folder)?;
        return Ok(Libtorch {
            folder,
            source: Source::Folder,
        });
    }
    let folder = install::ensure(&crate::wheels::cache_root()?, verify)?;
    Ok(Libtorch {
        folder,
        source: Source::Cache,
    })
}

fn is_set(name: &str) -> bool {
    std::env::var_os(name).is_some()
}

impl Libtorch {
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Makes a cargo command compile against this libtorch.
    pub(crate) fn apply(&self, command: &mut Command) {
        if self.source != Source::Python {
            command.env("LIBTORCH", &self.folder);
        }
    }

    /// Hides every libtorch from a cargo command.
    pub(crate) fn remove(command: &mut Command) {
        command
            .env_remove("LIBTORCH")
            .env_remove("LIBTORCH_USE_PYTORCH");
    }

    pub(crate) fn export_line(&self) -> String {
        match self.source {
            Source::Python => "export LIBTORCH_USE_PYTORCH=1".to_owned(),
            _ => format!("export LIBTORCH='{}'", self.folder.display()),
        }
    }

    pub(crate) fn describe(&self) -> String {
        let source = match self.source {
            Source::Python => "python's torch package, from LIBTORCH_USE_PYTORCH",
            Source::Folder => "from LIBTORCH",
            Source::Cache => "verified",
        };
        format!(
            "libtorch {TORCH_VERSION} ({source}): {}",
            self.folder.display()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workspace_pins_the_tch_that_this_libtorch_is_for() {
        let manifest =
            std::fs::read_to_string(crate::workspace::root().join("Cargo.toml")).unwrap();
        for package in ["tch", "torch-sys"] {
            let pin = format!("\n{package} = {{ version = \"={TCH_VERSION}\"");
            assert!(
                manifest.contains(&pin),
                "root Cargo.toml lacks `{}`",
                pin.trim()
            );
        }
    }
}

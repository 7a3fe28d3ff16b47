//! Where the workspace is, and cargo commands that run in it.

use crate::libtorch::Libtorch;
use anyhow::Result;
use cargo_metadata::{Metadata, MetadataCommand, Package};
use std::path::PathBuf;
use std::process::Command;

/// The root of this checkout.
pub(crate) fn root() -> PathBuf {
    // At run time if possible: checkouts that share a target folder may share this program.
    let built_in = || env!("CARGO_MANIFEST_DIR").into();
    let here = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(built_in));
    here.parent()
        .expect("the xtask package lies in the workspace root")
        .to_path_buf()
}

/// The packages of the workspace.
pub(crate) fn packages() -> Result<Vec<Package>> {
    let metadata = metadata()?;
    Ok(metadata.workspace_packages().into_iter().cloned().collect())
}

/// The folder of build outputs, wherever the user's cargo settings put it.
pub(crate) fn target_folder() -> Result<PathBuf> {
    Ok(metadata()?.target_directory.into_std_path_buf())
}

/// What cargo knows of the workspace, without its dependencies.
pub(crate) fn metadata() -> Result<Metadata> {
    let mut command = MetadataCommand::new();
    Ok(command
        .manifest_path(root().join("Cargo.toml"))
        .no_deps()
        .exec()?)
}

/// A cargo command in the workspace root that compiles against `libtorch`.
pub(crate) fn cargo(libtorch: &Libtorch) -> Command {
    let mut command = plain_cargo();
    libtorch.apply(&mut command);
    command
}

/// A cargo command in the workspace root.
pub(crate) fn plain_cargo() -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.current_dir(root());
    // `cargo run` sets these for this program; a child cargo would take them for its own.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_PKG_") || text.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&name);
        }
    }
    command
}

//! Finds NVRTC, the compiler of the CUDA sources, or installs it from its PyPI wheel. It needs no GPU.

use crate::wheels::{self, Installation, MANIFEST, Record, Wheel, download, write};
use anyhow::{Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Of the CUDA that the pinned libtorch is built for.
const VERSION: &str = "13.0.88";
/// What the kernels' tests look in first; a user's own setting wins.
const FOLDERS: &str = "DRIVETRAIN_CUDA_LIBRARIES";

/// Where NVRTC is.
#[derive(Debug)]
pub(crate) enum Nvrtc {
    /// The user named folders.
    Named,
    /// Installed by us.
    Cache(PathBuf),
}

/// Finds or installs it.
pub(crate) fn ensure(verify: bool) -> Result<Nvrtc> {
    if std::env::var_os(FOLDERS).is_some_and(|folders| !folders.is_empty()) {
        return Ok(Nvrtc::Named);
    }
    let installation = Installation {
        what: &format!("NVRTC {VERSION}"),
        folder: &format!("nvrtc-{VERSION}"),
        fill: &fill,
    };
    let folder = installation.ensure(&wheels::cache_root()?, verify)?;
    Ok(Nvrtc::Cache(folder.join("lib")))
}

impl Nvrtc {
    /// Makes the tests of a cargo command find it.
    pub(crate) fn apply(&self, command: &mut Command) {
        if let Self::Cache(folder) = self {
            command.env(FOLDERS, folder);
        }
    }

    pub(crate) fn describe(&self) -> String {
        match self {
            Self::Named => format!("NVRTC (from {FOLDERS})"),
            Self::Cache(folder) => format!("NVRTC {VERSION} (verified): {}", folder.display()),
        }
    }
}

/// Makes a complete NVRTC in `fresh`, its manifest last: the compiler and its built-ins.
fn fill(staging: &Path, fresh: &Path) -> Result<()> {
    let requirement = format!("nvidia-cuda-nvrtc=={VERSION}");
    let help = format!("set {FOLDERS} to the folder of a libnvrtc");
    let mut wheel = Wheel::open(&download(&requirement, &staging.join("nvrtc"), &help)?)?;
    let mut manifest = Record::default();
    wheel.unpack(fresh, place, &mut manifest)?;
    ensure!(
        manifest.0.len() == 2,
        "{requirement} has {:?}",
        manifest.0.keys()
    );
    let text = manifest.to_text();
    write(fresh, MANIFEST, &text, &mut manifest)
}

/// The two libraries, but not their second builds for other C libraries.
fn place(path: &str) -> Option<String> {
    let name = path.rsplit('/').next()?;
    let wanted = ["libnvrtc.so.", "libnvrtc-builtins.so."];
    wanted
        .iter()
        .any(|start| name.starts_with(start))
        .then(|| format!("lib/{name}"))
}

#[cfg(test)]
mod tests {
    use super::place;

    #[test]
    fn the_compiler_and_its_builtins_are_unpacked_and_nothing_else() {
        let all = [
            "nvidia/cu13/include/nvrtc.h",
            "nvidia/cu13/lib/libnvrtc-builtins.alt.so.13.0",
            "nvidia/cu13/lib/libnvrtc-builtins.so.13.0",
            "nvidia/cu13/lib/libnvrtc.alt.so.13",
            "nvidia/cu13/lib/libnvrtc.so.13",
            "nvidia_cuda_nvrtc-13.0.88.dist-info/RECORD",
        ];
        let placed: Vec<_> = all.into_iter().filter_map(place).collect();
        assert_eq!(
            placed,
            ["lib/libnvrtc-builtins.so.13.0", "lib/libnvrtc.so.13"]
        );
    }
}

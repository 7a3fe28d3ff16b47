//! Installs libtorch for the CPU from PyPI wheels into the per-user cache.
//!
//! Of the torch wheel only what a CPU build needs is unpacked. `libtorch_cpu.so` needs two CUDA
//! libraries at load time (they work without a driver); they come from the wheels that torch pins.

use super::{TORCH_VERSION, metadata};
use crate::wheels::{Installation, MANIFEST, Record, Wheel, download, write};
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};

/// Shared libraries out of the torch wheel.
const TORCH_LIBRARIES: [&str; 3] = [
    "torch/lib/libtorch_cpu.so",
    "torch/lib/libc10.so",
    "torch/lib/libgomp.so.1",
];
/// Packages with the libraries that `libtorch_cpu.so` loads, and how these files' names start.
const COMPANIONS: [(&str, &str); 2] = [
    ("nvidia-cuda-runtime", "libcudart.so."),
    ("nvidia-cuda-cupti", "libcupti.so."),
];

/// Returns the installed libtorch, after installing or repairing it if need be.
pub(super) fn ensure(cache: &Path, verify: bool) -> Result<PathBuf> {
    let installation = Installation {
        what: &format!("libtorch {TORCH_VERSION}"),
        folder: &format!("libtorch-{TORCH_VERSION}-cpu"),
        fill: &fill,
    };
    installation.ensure(cache, verify)
}

fn help() -> String {
    format!("set LIBTORCH to a libtorch {TORCH_VERSION}, or LIBTORCH_USE_PYTORCH=1")
}

/// Makes a complete libtorch in `fresh`, its manifest last.
fn fill(staging: &Path, fresh: &Path) -> Result<()> {
    let mut manifest = Record::default();
    let requirement = format!("torch=={TORCH_VERSION}");
    let mut torch = Wheel::open(&download(&requirement, &staging.join("torch"), &help())?)?;
    let wanted = |path: &str| {
        let headers = path.starts_with("torch/include/") || path.starts_with("torch/share/");
        (headers || TORCH_LIBRARIES.contains(&path))
            .then(|| path.trim_start_matches("torch/").to_owned())
    };
    torch.unpack(fresh, wanted, &mut manifest)?;
    for library in TORCH_LIBRARIES {
        let path = library.trim_start_matches("torch/");
        ensure!(
            manifest.0.contains_key(path),
            "the torch wheel has no {library}"
        );
    }
    let toolkit = match metadata::pin(&torch.metadata, "cuda-toolkit") {
        Some(pin) => {
            Wheel::open(&download(&pin, &staging.join("cuda-toolkit"), &help())?)?.metadata
        }
        None => String::new(),
    };
    for (package, file_prefix) in COMPANIONS {
        let pin = metadata::pin(&torch.metadata, package)
            .or_else(|| metadata::pin(&toolkit, package))
            .with_context(|| format!("torch {TORCH_VERSION} pins no version of {package}"))?;
        let mut wheel = Wheel::open(&download(&pin, &staging.join(package), &help())?)?;
        let before = manifest.0.len();
        let wanted = |path: &str| {
            let name = path.rsplit('/').next()?;
            name.starts_with(file_prefix).then(|| format!("lib/{name}"))
        };
        wheel.unpack(fresh, wanted, &mut manifest)?;
        ensure!(
            manifest.0.len() > before,
            "{pin} has no file {file_prefix}*"
        );
    }
    // The wheel's libtorch.so would load libtorch_cuda.so; this ld script stands in its place.
    write(
        fresh,
        "lib/libtorch.so",
        "INPUT(libtorch_cpu.so)\n",
        &mut manifest,
    )?;
    // torch-sys compares this file with the version it was written for.
    write(
        fresh,
        "build-version",
        &format!("{TORCH_VERSION}+cpu\n"),
        &mut manifest,
    )?;
    let text = manifest.to_text();
    write(fresh, MANIFEST, &text, &mut manifest)
}

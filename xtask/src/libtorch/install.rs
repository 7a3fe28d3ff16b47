//! Installs libtorch for the CPU from PyPI wheels into the per-user cache.
//!
//! Of the torch wheel only what a CPU build needs is unpacked. `libtorch_cpu.so` needs two CUDA
//! libraries at load time (they work without a driver); they come from the wheels that torch pins.
//! All is made beside its final place, verified, and renamed last: a kill leaves nothing half-made.

use super::record::{Record, copy_hashed};
use super::wheel::Wheel;
use super::{TORCH_VERSION, metadata, pip};
use anyhow::{Context, Result, ensure};
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

const MANIFEST: &str = "MANIFEST";
const STAGING: &str = ".staging-";

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

/// `DRIVETRAIN_CACHE`, or `drivetrain` in `XDG_CACHE_HOME` or `~/.cache`.
pub(super) fn cache_root() -> Result<PathBuf> {
    let named = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let root = if let Some(folder) = named("DRIVETRAIN_CACHE") {
        PathBuf::from(folder)
    } else if let Some(folder) = named("XDG_CACHE_HOME") {
        PathBuf::from(folder).join("drivetrain")
    } else {
        let home = named("HOME").context(
            "no place for the cache: HOME is not set\n  help     set DRIVETRAIN_CACHE to a folder",
        )?;
        PathBuf::from(home).join(".cache/drivetrain")
    };
    Ok(std::path::absolute(root)?)
}

/// Returns the installed libtorch, after installing or repairing it if need be.
pub(super) fn ensure(cache: &Path, verify: bool) -> Result<PathBuf> {
    let folder = cache.join(format!("libtorch-{TORCH_VERSION}-cpu"));
    if check(&folder, verify).is_ok() {
        return Ok(folder);
    }
    fs::create_dir_all(cache).with_context(|| format!("cannot create {}", cache.display()))?;
    let _lock = lock(&cache.join("lock"))?;
    remove_leftovers(cache)?;
    // Another set-up may have finished while this one waited.
    if let Err(reason) = check(&folder, verify) {
        if folder.exists() {
            eprintln!("libtorch in the cache is not usable and is fetched again: {reason:#}");
        }
        install(cache, &folder)?;
    }
    Ok(folder)
}

fn check(folder: &Path, hash: bool) -> Result<()> {
    let manifest = folder.join(MANIFEST);
    let text = fs::read_to_string(&manifest)
        .with_context(|| format!("cannot read {}", manifest.display()))?;
    let record = Record::parse(&text).with_context(|| manifest.display().to_string())?;
    ensure!(!record.0.is_empty(), "{} is empty", manifest.display());
    record.check(folder, hash)
}

/// Held until the returned file is dropped, or the process ends in any way.
fn lock(path: &Path) -> Result<File> {
    let file = File::create(path).with_context(|| format!("cannot create {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => return Ok(file),
        Err(TryLockError::WouldBlock) => {
            eprintln!(
                "another set-up is at work ({}): waiting for it",
                path.display()
            );
        }
        Err(TryLockError::Error(error)) => {
            return Err(error).with_context(|| format!("cannot lock {}", path.display()));
        }
    }
    file.lock()
        .with_context(|| format!("cannot lock {}", path.display()))?;
    Ok(file)
}

/// Removes what killed set-ups left. The lock is held, so none of it is in use.
fn remove_leftovers(cache: &Path) -> Result<()> {
    for entry in fs::read_dir(cache)? {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(STAGING) {
            fs::remove_dir_all(entry.path())
                .with_context(|| format!("cannot remove {}", entry.path().display()))?;
        }
    }
    Ok(())
}

fn install(cache: &Path, folder: &Path) -> Result<()> {
    let staging = cache.join(format!("{STAGING}{}", std::process::id()));
    let fresh = staging.join("fresh");
    fs::create_dir_all(&fresh).with_context(|| format!("cannot create {}", fresh.display()))?;
    let made = fill(&staging, &fresh).and_then(|()| {
        if folder.exists() {
            fs::rename(folder, staging.join("old"))?;
        }
        fs::rename(&fresh, folder)?;
        Ok(())
    });
    let removed = fs::remove_dir_all(&staging);
    made.with_context(|| {
        format!(
            "cannot install libtorch {TORCH_VERSION} in {}",
            cache.display()
        )
    })?;
    removed.with_context(|| format!("cannot remove {}", staging.display()))
}

/// Makes a complete libtorch in `fresh`, its manifest last.
fn fill(staging: &Path, fresh: &Path) -> Result<()> {
    let mut manifest = Record::default();
    let requirement = format!("torch=={TORCH_VERSION}");
    let mut torch = Wheel::open(&pip::download(&requirement, &staging.join("torch"))?)?;
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
        Some(pin) => Wheel::open(&pip::download(&pin, &staging.join("cuda-toolkit"))?)?.metadata,
        None => String::new(),
    };
    for (package, file_prefix) in COMPANIONS {
        let pin = metadata::pin(&torch.metadata, package)
            .or_else(|| metadata::pin(&toolkit, package))
            .with_context(|| format!("torch {TORCH_VERSION} pins no version of {package}"))?;
        let mut wheel = Wheel::open(&pip::download(&pin, &staging.join(package))?)?;
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

fn write(folder: &Path, path: &str, content: &str, manifest: &mut Record) -> Result<()> {
    let mut file = File::create(folder.join(path))?;
    let entry = copy_hashed(&mut content.as_bytes(), &mut file)?;
    file.sync_all()?;
    manifest.0.insert(path.to_owned(), entry);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn installed(cache: &Path) -> PathBuf {
        let folder = cache.join(format!("libtorch-{TORCH_VERSION}-cpu"));
        fs::create_dir_all(folder.join("lib")).unwrap();
        let mut manifest = Record::default();
        write(&folder, "lib/libc10.so", "code", &mut manifest).unwrap();
        let text = manifest.to_text();
        write(&folder, MANIFEST, &text, &mut manifest).unwrap();
        folder
    }

    #[test]
    fn a_complete_installation_is_used_as_it_is() {
        let cache = tempfile::tempdir().unwrap();
        let folder = installed(cache.path());
        assert_eq!(ensure(cache.path(), true).unwrap(), folder);
    }

    #[test]
    fn damage_is_seen() {
        let cache = tempfile::tempdir().unwrap();
        let folder = installed(cache.path());
        fs::write(folder.join("lib/libc10.so"), "cod").unwrap();
        assert!(check(&folder, false).is_err());
        fs::write(folder.join("lib/libc10.so"), "cold").unwrap();
        assert!(
            check(&folder, false).is_ok(),
            "the daily check compares sizes"
        );
        assert!(check(&folder, true).is_err());
        fs::write(folder.join(MANIFEST), "").unwrap();
        assert!(
            check(&folder, false).is_err(),
            "nothing listed is nothing checked"
        );
    }

    #[test]
    fn leftovers_of_a_killed_set_up_go_and_the_rest_stays() {
        let cache = tempfile::tempdir().unwrap();
        let folder = installed(cache.path());
        fs::create_dir_all(cache.path().join(".staging-1/torch/tmp")).unwrap();
        remove_leftovers(cache.path()).unwrap();
        assert!(!cache.path().join(".staging-1").exists());
        check(&folder, true).unwrap();
    }

    #[test]
    fn the_lock_is_exclusive_until_dropped() {
        let cache = tempfile::tempdir().unwrap();
        let path = cache.path().join("lock");
        let held = lock(&path).unwrap();
        let other = File::open(&path).unwrap();
        assert!(matches!(other.try_lock(), Err(TryLockError::WouldBlock)));
        drop(held);
        other.try_lock().unwrap();
    }
}

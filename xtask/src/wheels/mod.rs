//! Installations made of PyPI wheels in the per-user cache: downloaded by pip, compared with the index's hash and
//! the wheels' `RECORD`.
//!
//! All is made beside its final place, verified, and renamed last: a kill leaves nothing half-made.

mod pip;
mod record;
mod wheel;

pub(crate) use pip::download;
pub(crate) use record::Record;
pub(crate) use wheel::Wheel;

use anyhow::{Context, Result, ensure};
use record::copy_hashed;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};

/// The list of an installation's files.
pub(crate) const MANIFEST: &str = "MANIFEST";
const STAGING: &str = ".staging-";

/// `DRIVETRAIN_CACHE`, or `drivetrain` in `XDG_CACHE_HOME` or `~/.cache`.
pub(crate) fn cache_root() -> Result<PathBuf> {
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

/// Something that is made of wheels.
pub(crate) struct Installation<'a> {
    /// As messages name it.
    pub(crate) what: &'a str,
    /// Its folder in the cache.
    pub(crate) folder: &'a str,
    /// Makes it in the second folder, its [`MANIFEST`] last; the first folder is for what is in the making.
    pub(crate) fill: &'a dyn Fn(&Path, &Path) -> Result<()>,
}

impl Installation<'_> {
    /// Returns its folder, after installing or repairing it if need be. `verify` hashes every file of an
    /// existing installation instead of comparing sizes.
    pub(crate) fn ensure(&self, cache: &Path, verify: bool) -> Result<PathBuf> {
        let folder = cache.join(self.folder);
        if check(&folder, verify).is_ok() {
            return Ok(folder);
        }
        fs::create_dir_all(cache).with_context(|| format!("cannot create {}", cache.display()))?;
        let _lock = lock(&cache.join("lock"))?;
        remove_leftovers(cache)?;
        // Another set-up may have finished while this one waited.
        if let Err(reason) = check(&folder, verify) {
            if folder.exists() {
                eprintln!(
                    "{} in the cache is not usable and is fetched again: {reason:#}",
                    self.what
                );
            }
            self.install(cache, &folder)?;
        }
        Ok(folder)
    }

    fn install(&self, cache: &Path, folder: &Path) -> Result<()> {
        let staging = cache.join(format!("{STAGING}{}", std::process::id()));
        let fresh = staging.join("fresh");
        fs::create_dir_all(&fresh).with_context(|| format!("cannot create {}", fresh.display()))?;
        let made = (self.fill)(&staging, &fresh).and_then(|()| {
            if folder.exists() {
                fs::rename(folder, staging.join("old"))?;
            }
            fs::rename(&fresh, folder)?;
            Ok(())
        });
        let removed = fs::remove_dir_all(&staging);
        made.with_context(|| format!("cannot install {} in {}", self.what, cache.display()))?;
        removed.with_context(|| format!("cannot remove {}", staging.display()))
    }
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

/// Writes a file and notes it in the manifest.
pub(crate) fn write(folder: &Path, path: &str, content: &str, manifest: &mut Record) -> Result<()> {
    let mut file = File::create(folder.join(path))?;
    let entry = copy_hashed(&mut content.as_bytes(), &mut file)?;
    file.sync_all()?;
    manifest.0.insert(path.to_owned(), entry);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLE: Installation<'static> = Installation {
        what: "sample 1",
        folder: "sample-1",
        fill: &|_, fresh| fill(fresh, "code"),
    };

    fn fill(folder: &Path, code: &str) -> Result<()> {
        fs::create_dir_all(folder.join("lib"))?;
        let mut manifest = Record::default();
        write(folder, "lib/libc10.so", code, &mut manifest)?;
        let text = manifest.to_text();
        write(folder, MANIFEST, &text, &mut manifest)
    }

    fn installed(cache: &Path) -> PathBuf {
        let folder = cache.join(SAMPLE.folder);
        fill(&folder, "code").unwrap();
        folder
    }

    #[test]
    fn a_complete_installation_is_used_as_it_is() {
        let cache = tempfile::tempdir().unwrap();
        let folder = installed(cache.path());
        fs::write(folder.join("mine"), "").unwrap();
        assert_eq!(SAMPLE.ensure(cache.path(), true).unwrap(), folder);
        assert!(folder.join("mine").exists(), "it was left alone");
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
    fn what_is_missing_or_damaged_is_made_again() {
        let cache = tempfile::tempdir().unwrap();
        let folder = SAMPLE.ensure(cache.path(), false).unwrap();
        fs::write(folder.join("lib/libc10.so"), "cod").unwrap();
        SAMPLE.ensure(cache.path(), false).unwrap();
        check(&folder, true).unwrap();
        fs::write(folder.join("lib/libc10.so"), "cold").unwrap();
        SAMPLE.ensure(cache.path(), true).unwrap();
        check(&folder, true).unwrap();
        let names: Vec<_> = fs::read_dir(cache.path())
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        assert!(names.len() == 2, "the folder and the lock: {names:?}");
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

//! Checks a libtorch that the user brings, before the compiler prints pages of undefined symbols.

use super::{TCH_VERSION, TORCH_VERSION};
use anyhow::{Context, Result, bail, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;

const PRINT_TORCH: &str = "import os, torch
print(torch.__version__)
print(torch._C._GLIBCXX_USE_CXX11_ABI)
print(os.path.dirname(torch.__file__))";

/// Checks the torch package of the python that `torch-sys` would ask, and returns its folder.
pub(super) fn python_package() -> Result<PathBuf> {
    let python = if super::is_set("VIRTUAL_ENV") {
        "python"
    } else {
        "python3"
    };
    let output = Command::new(python)
        .args(["-c", PRINT_TORCH])
        .output()
        .with_context(|| {
            format!("LIBTORCH_USE_PYTORCH is set, but `{python}` cannot be started")
        })?;
    ensure!(
        output.status.success(),
        "LIBTORCH_USE_PYTORCH is set, but `{python}` cannot import torch\n  found    {}\n  \
         expected torch {TORCH_VERSION}\n  help     {python} -m pip install torch=={TORCH_VERSION}, \
         or unset LIBTORCH_USE_PYTORCH and run `cargo xtask setup`",
        String::from_utf8_lossy(&output.stderr)
            .lines()
            .last()
            .unwrap_or("no message"),
    );
    let text = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<&str> = text.lines().collect();
    let [version, abi, folder] = lines[..] else {
        bail!(
            "`{python}` printed {} lines about torch, 3 were expected: {text:?}",
            lines.len()
        );
    };
    check_version("LIBTORCH_USE_PYTORCH", version, "torch.__version__")?;
    if abi != "True" {
        return Err(wrong_abi(
            "LIBTORCH_USE_PYTORCH",
            "torch._C._GLIBCXX_USE_CXX11_ABI",
        ));
    }
    Ok(PathBuf::from(folder))
}

/// Checks a folder with `include/` and `lib/`: complete, right version, C++11 ABI.
pub(super) fn folder(folder: &Path) -> Result<()> {
    let name = format!("LIBTORCH={}", folder.display());
    for part in [
        "lib/libtorch_cpu.so",
        "lib/libc10.so",
        "include/ATen/ATen.h",
    ] {
        ensure!(
            folder.join(part).exists(),
            "{name}: not a libtorch folder\n  found    no {part}\n  expected libtorch \
             {TORCH_VERSION} with include/ and lib/\n  help     {}",
            help(&name)
        );
    }
    let (version, file) = version_of(folder)
        .with_context(|| format!("{name}: cannot tell which version this is; {}", help(&name)))?;
    check_version(&name, &version, &file)?;
    let c10 = folder.join("lib/libc10.so");
    let bytes = std::fs::read(&c10).with_context(|| format!("cannot read {}", c10.display()))?;
    if std::env::var("LIBTORCH_CXX11_ABI").is_ok_and(|abi| abi == "0") {
        return Err(wrong_abi("LIBTORCH_CXX11_ABI=0", "the environment"));
    }
    if has_old_abi(&bytes) {
        return Err(wrong_abi(&name, "lib/libc10.so"));
    }
    Ok(())
}

/// What to do about a libtorch that a variable brought in (`name` is `VARIABLE` or
/// `VARIABLE=value`).
fn help(name: &str) -> String {
    let variable = name.split('=').next().unwrap_or(name);
    format!(
        "unset {variable} and run `cargo xtask setup` for one that fits, or give it libtorch \
         {TORCH_VERSION}"
    )
}

/// The version and the file that states it: libtorch archives carry `build-version`, the python
/// package `version.py`.
fn version_of(folder: &Path) -> Result<(String, String)> {
    if let Ok(text) = std::fs::read_to_string(folder.join("build-version")) {
        return Ok((text.trim().to_owned(), "build-version".to_owned()));
    }
    let text = std::fs::read_to_string(folder.join("version.py"))
        .context("found neither build-version nor version.py")?;
    let version = text
        .lines()
        .find_map(|line| line.strip_prefix("__version__ = "))
        .context("version.py states no __version__")?;
    Ok((
        version.trim_matches(['\'', '"']).to_owned(),
        "version.py".to_owned(),
    ))
}

fn check_version(name: &str, found: &str, stated_in: &str) -> Result<()> {
    // 2.11.0+cpu and 2.11.0+cu130 are the same interface.
    let bare = found.split('+').next().unwrap_or(found);
    ensure!(
        bare == TORCH_VERSION,
        "{name}: wrong libtorch version\n  found    {found} (in {stated_in})\n  expected \
         {TORCH_VERSION} (what tch {TCH_VERSION} compiles against)\n  help     {}",
        help(name)
    );
    Ok(())
}

fn wrong_abi(name: &str, stated_in: &str) -> anyhow::Error {
    anyhow::anyhow!(
        "{name}: wrong C++ ABI\n  found    the pre-C++11 ABI (in {stated_in})\n  expected the C++11 \
         ABI (_GLIBCXX_USE_CXX11_ABI=1), which libtorch {TORCH_VERSION} has\n  help     {}",
        help(name)
    )
}

/// The constructor of `c10::Error` takes a `std::string`; its mangled name tells which one.
fn has_old_abi(libc10: &[u8]) -> bool {
    let old = b"_ZN3c105ErrorC1ENS_14SourceLocationESs";
    let new = b"_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx11";
    let contains = |symbol: &[u8]| libc10.windows(symbol.len()).any(|window| window == symbol);
    contains(old) && !contains(new)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn fake_libtorch(version_file: &str, content: &str, symbol: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for part in ["lib", "include/ATen"] {
            fs::create_dir_all(folder.path().join(part)).unwrap();
        }
        fs::write(folder.path().join("lib/libtorch_cpu.so"), "").unwrap();
        fs::write(folder.path().join("include/ATen/ATen.h"), "").unwrap();
        fs::write(folder.path().join("lib/libc10.so"), format!("x{symbol}y")).unwrap();
        fs::write(folder.path().join(version_file), content).unwrap();
        folder
    }

    const NEW: &str = "_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_string";
    const OLD: &str = "_ZN3c105ErrorC1ENS_14SourceLocationESs";

    #[test]
    fn the_right_version_is_taken_from_either_file() {
        folder(fake_libtorch("build-version", "2.11.0+cpu\n", NEW).path()).unwrap();
        folder(fake_libtorch("version.py", "__version__ = '2.11.0+cu130'\n", NEW).path()).unwrap();
    }

    #[test]
    fn a_wrong_version_is_refused_with_found_and_expected() {
        let wrong = fake_libtorch("build-version", "2.4.1+cpu\n", NEW);
        let message = format!("{:#}", folder(wrong.path()).unwrap_err());
        for part in [
            "LIBTORCH=",
            "found    2.4.1+cpu",
            "expected 2.11.0",
            "help     unset",
        ] {
            assert!(message.contains(part), "no `{part}` in: {message}");
        }
        // A prefix of the right version is not the right version.
        let longer = fake_libtorch("build-version", "2.11.01\n", NEW);
        assert!(folder(longer.path()).is_err());
    }

    #[test]
    fn the_old_abi_is_refused() {
        let old = fake_libtorch("build-version", "2.11.0+cpu\n", OLD);
        let message = format!("{:#}", folder(old.path()).unwrap_err());
        assert!(
            message.contains("pre-C++11 ABI (in lib/libc10.so)"),
            "{message}"
        );
    }

    #[test]
    fn a_folder_without_libraries_is_refused() {
        let empty = tempfile::tempdir().unwrap();
        let message = format!("{:#}", folder(empty.path()).unwrap_err());
        assert!(message.contains("no lib/libtorch_cpu.so"), "{message}");
    }
}

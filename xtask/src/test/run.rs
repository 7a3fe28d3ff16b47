//! Runs one `cargo test`, streaming its output into the report.

use super::Selection;
use super::report::{Report, Target};
use anyhow::{Context, Result, ensure};
use cargo_metadata::Message;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

/// Builds the tests that `arguments` select, runs them all, and adds what happened to `report`
/// under the packages' names followed by `suffix`.
pub(super) fn suite(
    report: &mut Report,
    suffix: &str,
    cargo: impl Fn() -> Command,
    arguments: &[&str],
    selection: &Selection,
) -> Result<()> {
    let programs = build(cargo(), arguments)?;
    let mut command = cargo();
    command
        .args(["test", "--release", "--no-fail-fast"])
        .args(arguments)
        .arg("--");
    if selection.all {
        command.arg("--include-ignored");
    }
    command.args(&selection.filter).stdin(Stdio::null());
    // One pipe for both streams keeps cargo's headings and the programs' results in order.
    let (reader, writer) = std::io::pipe()?;
    command.stdout(writer.try_clone()?).stderr(writer);
    let mut child = command.spawn().context("cargo cannot be started")?;
    drop(command); // it holds the pipe's other end
    let mut reader = BufReader::new(reader);
    let mut line = Vec::new();
    let mut section = report.section(|heading| programs.get(heading).cloned(), suffix);
    while reader.read_until(b'\n', &mut line)? > 0 {
        std::io::stdout().write_all(&line)?;
        section.line(String::from_utf8_lossy(&line).trim_end());
        line.clear();
    }
    section.end(child.wait()?.success());
    Ok(())
}

/// Compiles, and says which package and target each test program belongs to.
fn build(mut command: Command, arguments: &[&str]) -> Result<BTreeMap<String, Target>> {
    command.args([
        "test",
        "--release",
        "--no-run",
        "--message-format=json-render-diagnostics",
    ]);
    command
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let mut child = command.spawn().context("cargo cannot be started")?;
    let stdout = child.stdout.take().context("cargo's output is piped")?;
    let mut programs = BTreeMap::new();
    let packages = crate::workspace::packages()?;
    let root = crate::workspace::root();
    for message in Message::parse_stream(BufReader::new(stdout)) {
        let Message::CompilerArtifact(artifact) = message? else {
            continue;
        };
        let Some(program) = artifact.executable.filter(|_| artifact.profile.test) else {
            continue;
        };
        let package = packages
            .iter()
            .find(|package| package.id == artifact.package_id);
        let package = package.with_context(|| format!("{program} is of no package of ours"))?;
        let target = Target {
            package: package.name.to_string(),
            name: artifact.target.name,
        };
        // cargo prints the path relative to the workspace where it can.
        let short = program
            .as_std_path()
            .strip_prefix(&root)
            .unwrap_or(program.as_std_path());
        programs.insert(short.display().to_string(), target);
    }
    ensure!(
        child.wait()?.success(),
        "the tests do not compile (see above)"
    );
    Ok(programs)
}

//! `cargo xtask demo` and `demo-model`: all set-up, then the main job on the model and data of `demo/`.

mod data;

use crate::{libtorch, workspace};
use anyhow::{Context, Result, ensure};
use std::path::PathBuf;
use std::process::Command;

/// Engines that the demo trains under.
const ENGINES: [&str; 2] = ["fsdp", "megatron"];

/// Fine-tunes the model under both engines, compares them with the f64 reference, and says where all is.
pub(crate) fn run() -> Result<()> {
    let program = Program::build()?;
    data::write_task(&program.target)?;
    let job = workspace::root().join("demo/job.yaml");
    for engine in ENGINES {
        let output = program.fresh(engine)?;
        let mut train = program.command("train");
        train
            .arg(&job)
            .args(["--set", &format!("backend={engine}")]);
        step(
            train
                .arg("--set")
                .arg(format!("output={}", output.display())),
        )?;
    }
    let report = program.target.join("compare.html");
    let mut compare = program.command("compare");
    compare
        .arg(&job)
        .args(["--backends", "fsdp,megatron,reference", "--steps", "20"]);
    step(compare.arg("--report").arg(&report))?;
    println!(
        "\nmetrics, checkpoints and models: {}",
        program.target.display()
    );
    println!("report: {}", report.display());
    Ok(())
}

/// Trains `demo/model` again from random weights, and puts the result there.
pub(crate) fn train_model() -> Result<()> {
    let program = Program::build()?;
    data::write_pretraining(&program.target)?;
    let output = program.fresh("pretrain")?;
    let demo = workspace::root().join("demo");
    let mut train = program.command("train");
    train.arg(demo.join("pretrain.yaml")).arg("--set");
    step(train.arg(format!("output={}", output.display())))?;
    let (from, to) = (
        output.join("model/model.safetensors"),
        demo.join("model/model.safetensors"),
    );
    std::fs::copy(&from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
    println!("the model is in {}", to.display());
    Ok(())
}

/// The built program and where the demo's files go.
struct Program {
    path: PathBuf,
    target: PathBuf,
}

impl Program {
    fn build() -> Result<Self> {
        let libtorch = libtorch::ensure(false)?;
        eprintln!("{}", libtorch.describe());
        let mut cargo = workspace::cargo(&libtorch);
        step(cargo.args([
            "build",
            "--release",
            "--package=drivetrain",
            "--bin=drivetrain",
        ]))?;
        let built = workspace::target_folder()?;
        let target = workspace::root().join("target/demo");
        std::fs::create_dir_all(&target)
            .with_context(|| format!("cannot make {}", target.display()))?;
        Ok(Self {
            path: built.join("release/drivetrain"),
            target,
        })
    }

    fn command(&self, name: &str) -> Command {
        let mut command = Command::new(&self.path);
        command.current_dir(workspace::root()).arg(name);
        command
    }

    /// A folder for a run, without an earlier demo's files.
    fn fresh(&self, name: &str) -> Result<PathBuf> {
        let folder = self.target.join(name);
        if folder.exists() {
            std::fs::remove_dir_all(&folder)
                .with_context(|| format!("cannot remove the last demo's {}", folder.display()))?;
        }
        Ok(folder)
    }
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

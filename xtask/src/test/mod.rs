//! `cargo xtask test`: every test of the workspace, and proof that each engine was tested.

mod engines;
mod report;
mod run;

use crate::libtorch::{self, Libtorch};
use crate::nvrtc;
use crate::workspace;
use anyhow::Result;
use report::Report;
use std::process::ExitCode;

/// What to run.
#[derive(Debug)]
pub(crate) struct Selection {
    /// Slow tests (`#[ignore]`) too.
    pub(crate) all: bool,
    /// Arguments for the test programs, such as a part of a test's name.
    pub(crate) filter: Vec<String>,
}

/// Streams the tests' output, then prints what ran and a last line with the sums.
pub(crate) fn run(selection: &Selection) -> Result<ExitCode> {
    let libtorch = libtorch::ensure(false)?;
    eprintln!("{}", libtorch.describe());
    let packages = workspace::packages()?;
    let mut report = Report::default();
    run::suite(
        &mut report,
        "",
        || workspace::cargo(&libtorch),
        &["--workspace"],
        selection,
    )?;
    let mut complaints = Vec::new();
    if selection.filter.is_empty() {
        complaints = engines::untested(&packages, &report);
        if engines::builds_without_libtorch(&packages) {
            without_libtorch(&mut report, selection)?;
        }
        if engines::has_cuda_sources(&packages) {
            cuda_sources(&mut report, &libtorch, selection)?;
        }
    } else {
        eprintln!("a filter was given: not checked that every engine was tested");
    }
    print!("\n{}", report.table());
    for complaint in &complaints {
        println!("NOT TESTED: {complaint}");
    }
    println!("{}", report.closing_line());
    let good = report.is_green() && complaints.is_empty();
    Ok(if good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The configuration of a machine that has no libtorch. `LIBTORCH` is taken away, so that anything
/// that still wants it fails to build.
fn without_libtorch(report: &mut Report, selection: &Selection) -> Result<()> {
    println!("\nwithout libtorch: drivetrain with the feature megatron alone");
    let cargo = || {
        let mut cargo = workspace::plain_cargo();
        Libtorch::remove(&mut cargo);
        cargo
    };
    let arguments = [
        "--package=drivetrain",
        "--no-default-features",
        "--features=megatron",
    ];
    run::suite(report, " (no libtorch)", cargo, &arguments, selection)
}

/// The tests that need NVRTC: every CUDA source compiled for every architecture, without a GPU; and what becomes of
/// `device: cuda` where there is none. The whole
/// workspace is selected, so that dependencies have the features they were built with above.
fn cuda_sources(report: &mut Report, libtorch: &Libtorch, selection: &Selection) -> Result<()> {
    let nvrtc = nvrtc::ensure(false)?;
    println!("\nCUDA sources: {}", nvrtc.describe());
    let cargo = || {
        let mut cargo = workspace::cargo(libtorch);
        nvrtc.apply(&mut cargo);
        cargo
    };
    let arguments = [
        "--workspace",
        "--features=drivetrain/cuda",
        "--test=nvrtc",
        "--test=cuda_libraries",
        "--test=device_faults",
    ];
    run::suite(report, " (cuda)", cargo, &arguments, selection)
}

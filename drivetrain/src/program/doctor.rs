//! `drivetrain doctor`.

use std::{process::ExitCode, sync::Arc};

use crate::{
    core::{Result, engine::Backend},
    tables::{mebibytes, table},
};
use clap::Args;
use serde_json::{Value, json};

use super::output::line;

#[derive(Debug, Args)]
pub(super) struct DoctorArgs {
    /// Print all of it as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &DoctorArgs, backends: &[Arc<dyn Backend>]) -> Result<ExitCode> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let rate = |threads| crate::kernels::measure_peak_flops(threads) / 1e9;
    let report = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "cores": cores,
        "memory_bytes": memory_bytes(),
        "gemm_gflops_one_core": rate(1),
        "gemm_gflops_all_cores": rate(cores),
        "libraries": libraries(),
        "environment": environment(),
        "backends": backends
            .iter()
            .map(|b| json!({ "name": b.name(), "capability": b.capability() }))
            .collect::<Vec<_>>(),
    });
    if args.json {
        super::output::json(&report)?;
        return Ok(ExitCode::SUCCESS);
    }
    let memory = report["memory_bytes"].as_u64();
    line(format!(
        "drivetrain {}  {cores} cores, {} of memory, f32 GEMM {:.1} GFLOP/s on one core, {:.1} on all",
        env!("CARGO_PKG_VERSION"),
        memory.map_or("an unknown amount".to_owned(), mebibytes),
        report["gemm_gflops_one_core"].as_f64().unwrap_or_default(),
        report["gemm_gflops_all_cores"].as_f64().unwrap_or_default(),
    ))?;
    let rows = backends.iter().map(|b| capability_row(&**b)).collect();
    line(table(
        &["backend", "families", "compute", "devices", "parallel"],
        rows,
    ))?;
    let list = |title: &str, none: &str, values: &Value| {
        let values: Vec<_> = values.as_array().into_iter().flatten().collect();
        line(if values.is_empty() { none } else { title })?;
        values
            .iter()
            .try_for_each(|value| line(format!("  {}", value.as_str().unwrap_or_default())))
    };
    list(
        "libraries loaded from outside the system:",
        "no library is loaded from outside the system",
        &report["libraries"],
    )?;
    let none = format!("environment: none is set of {}", VARIABLES.join(", "));
    list("environment:", &none, &report["environment"])?;
    Ok(ExitCode::SUCCESS)
}

fn capability_row(backend: &dyn Backend) -> Vec<String> {
    let c = backend.capability();
    let axes = [
        ("data", c.data_parallel.is_some()),
        ("tensor", c.tensor_parallel.is_some()),
        ("pipeline", c.pipeline_parallel.is_some()),
        ("context", c.context_parallel.is_some()),
        ("expert", c.expert_parallel.is_some()),
    ];
    let join = |items: Vec<String>| {
        if items.is_empty() {
            "-".to_owned()
        } else {
            items.join(" ")
        }
    };
    vec![
        backend.name().to_owned(),
        join(
            c.families
                .iter()
                .map(|f| format!("{f:?}").to_lowercase())
                .collect(),
        ),
        join(c.compute.iter().map(ToString::to_string).collect()),
        join(c.devices.iter().cloned().collect()),
        join(
            axes.iter()
                .filter(|a| a.1)
                .map(|a| a.0.to_owned())
                .collect(),
        ),
    ]
}

/// Shared libraries of this process that torch or CUDA bring, with where they were found.
fn libraries() -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut found: Vec<String> = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5))
        .filter(|path| {
            ["torch", "c10", "cudart", "cuda", "nccl", "gomp", "cupti"]
                .iter()
                .any(|n| path.contains(n))
                && path.contains(".so")
        })
        .map(str::to_owned)
        .collect();
    found.sort();
    found.dedup();
    found
}

/// Memory of the machine, where the system tells (Linux).
fn memory_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemTotal:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}

/// Variables that change what this program does; of the last, only whether it is set is told.
const VARIABLES: [&str; 8] = [
    "LIBTORCH",
    "LIBTORCH_USE_PYTORCH",
    "HF_HOME",
    "HF_ENDPOINT",
    "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS",
    "RUST_LOG",
    "HF_TOKEN",
];

fn environment() -> Vec<String> {
    VARIABLES
        .iter()
        .filter_map(|&name| {
            let value = std::env::var_os(name)?;
            Some(match name {
                "HF_TOKEN" => format!("{name} is set"),
                _ => format!("{name}={}", value.to_string_lossy()),
            })
        })
        .collect()
}

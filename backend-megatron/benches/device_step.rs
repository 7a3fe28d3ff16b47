//! Seconds of a training step with `device: cuda` and with `device: cpu`, one rank, side by side: for whoever has a GPU
//! (`kernels/scripts/gpu-check.sh` packs it). Hidden 1024, 16 heads, ffn 2752, 4 layers, a sequence of 1024 tokens.
#![allow(missing_docs, reason = "a program")]

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use drivetrain_core::{
    Result,
    batch::BatchTotals,
    config::{DeviceConfig, ParallelConfig},
    engine::{Engine, StepOptions, WeightInit, build_engine},
    launch::run_ranks,
    objective::Nll,
};
use drivetrain_megatron::Megatron;

#[path = "../tests/common/recompute.rs"]
mod recompute;

use recompute::{Quick, batch, job, model};

/// The first one compiles the kernels.
const STEPS: usize = 6;

/// Seconds of each step, and the loss before it.
fn steps(device: DeviceConfig) -> Result<Vec<(f64, f64)>> {
    let mut job = job(&[], 0);
    job.config.device = device;
    job.config.parallel = ParallelConfig::default();
    let (source, batch) = (Quick(model()), batch());
    let totals = BatchTotals::count(&batch);
    let all = run_ranks(1, Duration::from_secs(600), |world| {
        let init = WeightInit::Source(&source);
        let (mut engine, _) = build_engine(&Megatron, &job, world, init)?;
        (0..STEPS)
            .map(|_| {
                let began = Instant::now();
                let report = engine.forward_backward(&batch, &Nll::default(), &totals)?;
                engine.optim_step(&StepOptions::default())?;
                Ok((began.elapsed().as_secs_f64(), report.loss))
            })
            .collect::<Result<Vec<_>>>()
    })?;
    Ok(all.concat())
}

fn main() -> ExitCode {
    let mut code = ExitCode::SUCCESS;
    for (name, device) in [("cuda", DeviceConfig::Cuda), ("cpu", DeviceConfig::Cpu)] {
        match steps(device) {
            Ok(steps) => {
                for (step, (seconds, loss)) in steps.into_iter().enumerate() {
                    println!("{name:5} step {step}: {seconds:8.4} s, loss {loss:.6}");
                }
            }
            Err(error) => {
                eprintln!("{error}");
                code = ExitCode::FAILURE;
            }
        }
    }
    code
}

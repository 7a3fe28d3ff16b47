//! The `drivetrain` program, over engines of your choice.
//!
//! Exit codes: 0 done, 2 config or arguments, 3 data or a file (a stdout that is full among them), 4 a fault at run
//! time, 1 a defect of ours. A reader of stdout that leaves early changes none of it, but for `conform`, which ends
//! with 3.

mod check;
mod compare;
mod conform;
mod doctor;
mod export;
mod inspect;
mod interrupt;
mod job;
mod output;
mod processes;
mod progress;
mod score;
mod train;

use std::{io::IsTerminal, process::ExitCode, sync::Arc};

use crate::{
    core::{Result, engine::Backend},
    trace::Trace,
};
use clap::{Parser, Subcommand};
use tracing_subscriber::{EnvFilter, Layer, layer::SubscriberExt, util::SubscriberInitExt};

/// The program's `main`: its commands know these engines and no others. Reads the process's arguments.
pub fn main(backends: Vec<Arc<dyn Backend>>) -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            // Help and version are asked for; everything else is a fault of the arguments.
            let code = if error.use_stderr() { 2 } else { 0 };
            // Where it cannot be written there is nobody to tell.
            let _ = error.print();
            return ExitCode::from(code);
        }
    };
    let filter = EnvFilter::try_from_default_env();
    // Our own warnings are for whoever runs the program.
    let filter = filter.unwrap_or_else(|_| EnvFilter::new("error,drivetrain=warn"));
    let terminal = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .without_time()
        .log_internal_errors(false)
        .with_filter(filter);
    let trace = match &arguments.command {
        Command::Train(args) => args.trace(),
        _ => None,
    };
    tracing_subscriber::registry()
        .with(terminal)
        .with(trace.as_ref().map(Trace::layer))
        .init();
    match run(arguments, &backends, trace) {
        Ok(code) => code,
        Err(error) => {
            match error.is_secondary() {
                // The rank whose error it is tells the whole of it.
                true => output::note(format!("error: {}", error.summary())),
                false => output::note(format!("error: {error}")),
            }
            ExitCode::from(error.kind().exit_code())
        }
    }
}

/// Train language models under engines that are proven to agree.
#[derive(Debug, Parser)]
#[command(name = "drivetrain", version, max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Train a job; writes metrics, checkpoints and the trained model
    Train(train::TrainArgs),
    /// Log-probs and entropies of given sequences under a model
    Score(score::ScoreArgs),
    /// Run one job under several engines: what each costs, and whether they agree
    Compare(compare::CompareArgs),
    /// Run the conformance suite on engines of this build
    Conform(conform::ConformArgs),
    /// Find every fault of a job without running it
    Check(check::CheckArgs),
    /// A checkpoint as a Hugging Face folder
    Export(export::ExportArgs),
    /// What a checkpoint, a folder of checkpoints or a Hugging Face folder holds
    Inspect(inspect::InspectArgs),
    /// What this build and this machine have
    Doctor(doctor::DoctorArgs),
}

fn run(
    arguments: Arguments,
    backends: &[Arc<dyn Backend>],
    trace: Option<Arc<Trace>>,
) -> Result<ExitCode> {
    match arguments.command {
        Command::Train(args) => train::run(&args, backends, trace),
        Command::Score(args) => score::run(&args, backends),
        Command::Compare(args) => compare::run(&args, backends),
        Command::Conform(args) => conform::run(&args, backends),
        Command::Check(args) => check::run(&args, backends),
        Command::Export(args) => export::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Doctor(args) => doctor::run(&args, backends),
    }
}

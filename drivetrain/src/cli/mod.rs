//! Commands and their arguments. Exit codes: 0 done, 2 config or arguments, 3 data or a file, 4 a fault at run
//! time, 1 a defect of ours.

mod check;
mod compare;
mod conform;
mod doctor;
mod export;
mod job;
mod output;
mod progress;
mod score;
mod train;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use drivetrain::core::Result;

/// Train language models under engines that are proven to agree.
#[derive(Debug, Parser)]
#[command(name = "drivetrain", version, max_term_width = 100)]
pub(crate) struct Arguments {
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
    /// What this build and this machine have
    Doctor(doctor::DoctorArgs),
}

/// Runs a command.
pub(crate) fn run(arguments: Arguments) -> Result<ExitCode> {
    match arguments.command {
        Command::Train(args) => train::run(&args),
        Command::Score(args) => score::run(&args),
        Command::Compare(args) => compare::run(&args),
        Command::Conform(args) => conform::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Export(args) => export::run(&args),
        Command::Doctor(args) => doctor::run(&args),
    }
}

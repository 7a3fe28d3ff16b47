//! Set-up and chores of the workspace. `cargo xtask --help` lists them.

mod arrows;
mod demo;
mod libtorch;
mod nvrtc;
mod progress;
mod test;
mod wheels;
mod workspace;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", about = "Set-up and chores of the workspace")]
struct Arguments {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Debug, Subcommand)]
enum Chore {
    /// Fetch and verify everything builds and tests need (libtorch, NVRTC), once per user
    Setup {
        /// Hash every installed file again instead of comparing sizes
        #[arg(long)]
        verify: bool,
    },
    /// Set up, then run every test of the workspace and show that each engine was tested
    Test {
        /// Slow tests (`#[ignore]`) too
        #[arg(long)]
        all: bool,
        /// Arguments for the test programs, such as a part of a test's name
        #[arg(last = true)]
        filter: Vec<String>,
    },
    /// Set up, then train the model of demo/ under both engines, compare them and write the report
    Demo,
    /// Train the model of demo/ again, from random weights
    DemoModel,
    /// Check the architecture: who depends on whom, and what source may not contain
    Arrows,
    /// Print the lines that let plain `cargo build` find libtorch: eval "$(cargo xtask env)"
    Env,
    /// Run any cargo command with libtorch set up: cargo xtask cargo build -p drivetrain
    Cargo {
        /// The command and its arguments, as cargo takes them
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Print libtorch's folder and nothing else (set up first if need be)
    Libtorch,
}

fn main() -> ExitCode {
    match run(Arguments::parse().chore) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(chore: Chore) -> anyhow::Result<ExitCode> {
    match chore {
        Chore::Setup { verify } => {
            let libtorch = libtorch::ensure(verify)?;
            println!(
                "{}\n{}\nFor plain cargo commands in this shell:\n  {}",
                libtorch.describe(),
                nvrtc::ensure(verify)?.describe(),
                libtorch.export_line()
            );
        }
        Chore::Test { all, filter } => return test::run(&test::Selection { all, filter }),
        Chore::Demo => demo::run()?,
        Chore::DemoModel => demo::train_model()?,
        Chore::Arrows => return arrows::run(),
        Chore::Env => println!("{}", libtorch::ensure(false)?.export_line()),
        Chore::Cargo { arguments } => {
            let status = workspace::cargo(&libtorch::ensure(false)?)
                .args(arguments)
                .status()?;
            return Ok(if status.success() {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            });
        }
        Chore::Libtorch => println!("{}", libtorch::ensure(false)?.folder().display()),
    }
    Ok(ExitCode::SUCCESS)
}

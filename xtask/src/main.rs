//! Set-up and chores of the workspace. `cargo xtask --help` lists them.

mod libtorch;
mod progress;
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
    /// Fetch and verify everything a build needs (libtorch), once per user
    Setup {
        /// Hash every installed file again instead of comparing sizes
        #[arg(long)]
        verify: bool,
    },
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
            println!("{}", libtorch.describe());
            println!(
                "For plain cargo commands in this shell:\n  {}",
                libtorch.export_line()
            );
        }
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

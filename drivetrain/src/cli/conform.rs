//! `drivetrain conform`.

use std::process::ExitCode;

use clap::Args;
use drivetrain::{
    conformance::{Suite, SuiteArgs},
    core::{Error, ErrorKind, Result},
};

#[derive(Debug, Args)]
pub(super) struct ConformArgs {
    /// Engines; all of this build if unsaid
    #[arg(long, value_delimiter = ',')]
    backends: Vec<String>,
    /// Arguments of the suite, such as a part of a case's name, --list, --seed N, --report FILE
    #[arg(last = true)]
    suite: Vec<String>,
}

pub(super) fn run(args: &ConformArgs) -> Result<ExitCode> {
    let backends = if args.backends.is_empty() {
        drivetrain::backends()
    } else {
        args.backends
            .iter()
            .map(|n| drivetrain::backend(n))
            .collect::<Result<_>>()?
    };
    let suite = SuiteArgs::parse(args.suite.iter().cloned())
        .map_err(|fault| Error::new(ErrorKind::Config, "conform", fault))?;
    let outcome = Suite::new(backends).run(&suite)?;
    Ok(if outcome.passed() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(ErrorKind::Parity.exit_code())
    })
}

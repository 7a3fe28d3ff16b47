//! `drivetrain conform`.

use std::{process::ExitCode, sync::Arc};

use crate::{
    conformance::{Suite, SuiteArgs},
    core::{Error, ErrorKind, Result, engine::Backend},
    find_backend,
};
use clap::Args;

#[derive(Debug, Args)]
pub(super) struct ConformArgs {
    /// Engines; all of this build if unsaid
    #[arg(long, value_delimiter = ',')]
    backends: Vec<String>,
    /// Arguments of the suite, such as a part of a case's name, --list, --seed N, --report FILE
    #[arg(last = true)]
    suite: Vec<String>,
}

pub(super) fn run(args: &ConformArgs, backends: &[Arc<dyn Backend>]) -> Result<ExitCode> {
    let chosen = if args.backends.is_empty() {
        backends.to_vec()
    } else {
        args.backends
            .iter()
            .map(|n| find_backend(backends, n))
            .collect::<Result<_>>()?
    };
    let suite = SuiteArgs::parse(args.suite.iter().cloned())
        .map_err(|fault| Error::new(ErrorKind::Config, "conform", fault))?;
    let outcome = Suite::new(chosen).run(&suite)?;
    Ok(if outcome.passed() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(ErrorKind::Parity.exit_code())
    })
}

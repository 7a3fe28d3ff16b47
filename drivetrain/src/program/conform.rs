//! `drivetrain conform`.

use std::{
    any::Any,
    panic::{self, AssertUnwindSafe},
    process::ExitCode,
    sync::Arc,
};

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
    /// Arguments of the suite, after `--`: a part of a case's name, --list, --seed N, --all, --report FILE, --verbose
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
    let run = || -> Result<_> {
        let outcome = Suite::new(chosen).run(&suite)?;
        outcome.print(suite.verbose);
        Ok(outcome)
    };
    let Some(outcome) = ending_with_stdout(run)? else {
        return Ok(ExitCode::from(ErrorKind::File.exit_code()));
    };
    Ok(if outcome.passed() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(ErrorKind::Parity.exit_code())
    })
}

/// The harness of the suite panics where it cannot print. `None` if the reader has left, who wants to hear nothing.
fn ending_with_stdout<T>(run: impl FnOnce() -> Result<T>) -> Result<Option<T>> {
    let before = Arc::new(panic::take_hook());
    let hook = Arc::clone(&before);
    panic::set_hook(Box::new(move |info| {
        if unprintable(info.payload()).is_none() {
            hook(info);
        }
    }));
    let outcome = panic::catch_unwind(AssertUnwindSafe(run));
    panic::set_hook(Box::new(move |info| before(info)));
    let payload = match outcome {
        Ok(outcome) => return outcome.map(Some),
        Err(payload) => payload,
    };
    match unprintable(&*payload) {
        Some(message) if message.contains("BrokenPipe") => Ok(None),
        Some(message) => {
            let what = "cannot write to standard output: there is no verdict";
            Err(Error::new(ErrorKind::File, "conform", what).caused_by(message))
        }
        None => panic::resume_unwind(payload),
    }
}

/// What a panic says that came of a stdout that is closed or full.
fn unprintable(payload: &(dyn Any + Send)) -> Option<String> {
    let message = payload.downcast_ref::<String>()?;
    let kinds = ["BrokenPipe", "StorageFull"];
    let named = kinds.iter().any(|kind| message.contains(kind));
    named.then(|| message.clone())
}

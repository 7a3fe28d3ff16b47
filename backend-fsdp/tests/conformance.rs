//! The suite that any engine can run, on this one.

use std::{process::ExitCode, sync::Arc};

use drivetrain_conformance::Suite;
use drivetrain_fsdp::Fsdp;

fn main() -> ExitCode {
    Suite::new(vec![Arc::new(Fsdp)]).at_least(1000).main()
}

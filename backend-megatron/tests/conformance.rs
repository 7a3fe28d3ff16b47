//! The conformance suite on this engine.

use std::{process::ExitCode, sync::Arc};

use drivetrain_conformance::Suite;
use drivetrain_megatron::Megatron;

fn main() -> ExitCode {
    Suite::new(vec![Arc::new(Megatron)]).at_least(1900).main()
}

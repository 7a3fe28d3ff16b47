//! Thread ranks are a communicator.

use std::{process::ExitCode, sync::Arc};

use drivetrain_conformance::communicator::{Launch, communicator_cases};
use drivetrain_core::launch::run_ranks;
use libtest_mimic::Arguments;

fn main() -> ExitCode {
    let launch: Launch =
        Arc::new(|world_size, timeout, body| run_ranks(world_size, timeout, body).map(drop));
    let cases = communicator_cases("local", &launch);
    libtest_mimic::run(&Arguments::from_args(), cases).exit_code()
}

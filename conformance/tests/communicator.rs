//! Thread ranks are a communicator, and one with a hook before its operations is too.

use std::{process::ExitCode, sync::Arc};

use drivetrain_conformance::communicator::{Launch, communicator_cases};
use drivetrain_core::{
    communicator::{Intercepted, Recorder},
    launch::run_ranks,
};
use libtest_mimic::Arguments;

fn main() -> ExitCode {
    let launch: Launch =
        Arc::new(|world_size, timeout, body| run_ranks(world_size, timeout, body).map(drop));
    let hooked: Launch = Arc::new(|world_size, timeout, body| {
        run_ranks(world_size, timeout, |world| {
            let hook = Arc::new(Recorder::default());
            body(Arc::new(Intercepted::new(world, hook)))
        })
        .map(drop)
    });
    let mut cases = communicator_cases("local", &launch);
    cases.extend(communicator_cases("intercepted", &hooked));
    libtest_mimic::run(&Arguments::from_args(), cases).exit_code()
}

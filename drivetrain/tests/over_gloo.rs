//! The suite over Gloo: every rank of a case has a connection of its own, as in a process of its own.

use std::{process::ExitCode, sync::Arc};

use drivetrain::conformance::Suite;
use drivetrain_c10d::in_one_process::Worlds;

fn main() -> ExitCode {
    let worlds = Worlds::default();
    let engines = drivetrain::backends();
    let engines = engines.into_iter().filter(|engine| !engine.is_exact());
    Suite::new(engines.collect())
        .groups(&["layouts/dense/", "layouts/mixtral/"])
        .at_least(60)
        .over(Arc::new(move |size, timeout, body| match size {
            // Nobody to talk to.
            1 => drivetrain::core::launch::run_ranks(1, timeout, body).map(drop),
            _ => worlds.run(size, timeout, body),
        }))
        .main()
}

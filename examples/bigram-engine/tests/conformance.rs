//! The suite, on a stranger's engine. At least 40 cases: were the capability to shrink, this would fail.

use std::{process::ExitCode, sync::Arc};

use bigram_engine::BigramBackend;
use drivetrain_conformance::Suite;

fn main() -> ExitCode {
    Suite::new(vec![Arc::new(BigramBackend)])
        .at_least(40)
        .main()
}

//! The `drivetrain` program with an engine of a stranger's own, and no other.

use std::{process::ExitCode, sync::Arc};

use bigram_engine::BigramBackend;

fn main() -> ExitCode {
    drivetrain::program::main(vec![Arc::new(BigramBackend)])
}

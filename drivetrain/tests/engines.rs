//! Every engine of this build beside every other: the same training, and checkpoints that move between them.
//! (Each engine runs the rest of the suite in its own crate.)

use std::process::ExitCode;

use drivetrain::conformance::Suite;

fn main() -> ExitCode {
    Suite::new(drivetrain::backends())
        .groups(&["engines/", "checkpoint/"])
        .at_least(60)
        .main()
}

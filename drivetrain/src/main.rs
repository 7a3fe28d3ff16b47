//! The `drivetrain` program, with every engine of this build.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    drivetrain::program::main(drivetrain::backends())
}

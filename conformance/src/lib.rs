//! The suite that any engine can run, ours or a stranger's, and the f64 oracle it is measured against.
//!
//! A test target without a harness runs it:
//!
//! ```toml
//! [[test]]
//! name = "conformance"
//! harness = false
//! ```
//!
//! ```no_run
//! // tests/conformance.rs
//! use drivetrain_conformance::oracle::ReferenceBackend;
//! drivetrain_conformance::main!(ReferenceBackend::new());
//! ```
//!
//! Cases are chosen by what the backend's capability claims and its `check` allows; what it does not claim it
//! must refuse, and cases test that too. No case selected is a failure.
#![forbid(unsafe_code)]

pub mod cases;
pub mod communicator;
pub mod compare;
pub mod fixture;
pub mod golden;
pub mod objective;
pub mod oracle;
pub mod state;
pub mod suite;
pub mod tolerance;
pub mod train;

pub use suite::{Suite, SuiteArgs};

/// The `main` of a test target: runs the suite on these backends (expressions that give a `Backend`).
#[macro_export]
macro_rules! main {
    ($($backend:expr),+ $(,)?) => {
        fn main() -> ::std::process::ExitCode {
            $crate::Suite::new(vec![$(::std::sync::Arc::new($backend)),+]).main()
        }
    };
}

//! One training contract, several engines: the crate a framework links.
//!
//! ```no_run
//! use drivetrain::{core::config::{JobSource, load_job}, run::{TrainOptions, train}};
//!
//! let backends = drivetrain::backends();
//! let refs: Vec<_> = backends.iter().map(|b| &**b as _).collect();
//! let job = load_job(&JobSource::read("job.yaml".as_ref())?, &[], &refs, &drivetrain::data::Hub::from_env())?;
//! let summary = train(&job, &*backends[job.backend], &TrainOptions::default(), &mut ())?;
//! println!("{} steps, loss {:?}", summary.step, summary.last_loss);
//! # Ok::<(), drivetrain::core::Error>(())
//! ```
#![deny(unsafe_code)]

pub use drivetrain_conformance as conformance;
pub use drivetrain_core as core;
pub use drivetrain_data as data;
pub use drivetrain_kernels as kernels;

pub mod launch;
pub mod program;
pub mod report;
pub mod run;
pub mod tables;
pub mod trace;

use std::sync::Arc;

use drivetrain_core::{Error, ErrorKind, Result, engine::Backend};

/// Every engine that this build has, and the f64 `reference` as the last.
pub fn backends() -> Vec<Arc<dyn Backend>> {
    vec![
        #[cfg(feature = "fsdp")]
        Arc::new(drivetrain_fsdp::Fsdp),
        #[cfg(feature = "megatron")]
        Arc::new(drivetrain_megatron::Megatron),
        Arc::new(drivetrain_conformance::oracle::ReferenceBackend::new()),
    ]
}

/// The engine with this name, of those that this build has.
///
/// # Errors
/// As [`find_backend`].
pub fn backend(name: &str) -> Result<Arc<dyn Backend>> {
    find_backend(&backends(), name)
}

/// The engine with this name.
///
/// # Errors
/// `Config` naming those there are.
pub fn find_backend(backends: &[Arc<dyn Backend>], name: &str) -> Result<Arc<dyn Backend>> {
    let found = backends.iter().find(|b| b.name() == name);
    found.cloned().ok_or_else(|| {
        let names: Vec<_> = backends.iter().map(|b| b.name()).collect();
        Error::new(ErrorKind::Config, "choose_backend", "no such backend")
            .with("found", name)
            .with("expected", format!("one of {names:?}"))
    })
}

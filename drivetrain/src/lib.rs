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
#![forbid(unsafe_code)]

pub use drivetrain_conformance as conformance;
pub use drivetrain_core as core;
pub use drivetrain_data as data;
pub use drivetrain_kernels as kernels;

pub mod report;
pub mod run;
pub mod tables;

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

/// The engine with this name.
///
/// # Errors
/// `Config` naming those there are.
pub fn backend(name: &str) -> Result<Arc<dyn Backend>> {
    let all = backends();
    let names: Vec<String> = all.iter().map(|b| b.name().to_owned()).collect();
    all.into_iter().find(|b| b.name() == name).ok_or_else(|| {
        Error::new(
            ErrorKind::Config,
            "choose_backend",
            "this build has no such backend",
        )
        .with("found", name)
        .with("expected", format!("one of {names:?}"))
    })
}

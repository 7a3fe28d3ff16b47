//! From a checked job to an engine behind its guard.

use std::sync::Arc;

use super::{Backend, GuardOptions, Guarded, WeightInit};
use crate::{
    Error, ErrorKind, Result, Severity,
    communicator::Communicator,
    config::{JobSpec, check_claims},
    plan::TrainPlan,
};

/// Checks, plans and builds this rank's engine, behind its guard. Collective.
///
/// # Errors
/// `Unsupported` with everything that the job asks for and the backend does not claim; `Config` with every
/// fault that the backend's check finds; a world of the wrong size; those of
/// [`Backend::build`].
pub fn build_engine(
    backend: &dyn Backend,
    job: &JobSpec,
    world: Arc<dyn Communicator>,
    init: WeightInit<'_>,
) -> Result<(Guarded, TrainPlan)> {
    let unclaimed = check_claims(job, backend);
    if unclaimed.iter().any(|d| d.severity == Severity::Error) {
        return Err(Error::unclaimed("build", unclaimed));
    }
    let faults = backend.check(job);
    if faults.iter().any(|d| d.severity == Severity::Error) {
        return Err(Error::diagnosed("check", faults));
    }
    let plan = backend.plan(job)?;
    if plan.mesh.world_size() != world.world_size() {
        return Err(Error::new(
            ErrorKind::Config,
            "build",
            "the mesh does not fit the world",
        )
        .with(
            "expected",
            format!("{} ranks ({:?})", plan.mesh.world_size(), plan.mesh),
        )
        .with("found", format!("{} ranks", world.world_size())));
    }
    let options = GuardOptions {
        vocab_size: job.model.vocab_size,
        max_length: job
            .config
            .data
            .max_length
            .unwrap_or(job.model.max_position_embeddings),
    };
    let engine = backend.build(&plan, world.clone(), init)?;
    let capability = backend.capability();
    let guarded = Guarded::new(engine, world, backend.name(), capability, options);
    Ok((guarded, plan))
}

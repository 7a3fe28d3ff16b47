//! From a checked job to an engine behind its guard.

use std::sync::Arc;

use super::{Backend, GuardOptions, Guarded, WeightInit};
use crate::{
    Error, ErrorKind, Result, Severity,
    communicator::Communicator,
    config::{JobSpec, judge_job},
    plan::TrainPlan,
    weights::check_shapes,
};

/// Checks, plans and builds this rank's engine, behind its guard. Collective.
///
/// # Errors
/// Every fault of the job ([`check_job`](crate::config::check_job)) at once: `Unsupported` if it asks for
/// what the backend does not claim, else `Config`. A world of the wrong size; those of [`Backend::build`].
pub fn build_engine(
    backend: &dyn Backend,
    job: &JobSpec,
    world: Arc<dyn Communicator>,
    init: WeightInit<'_>,
) -> Result<(Guarded, TrainPlan)> {
    let (faults, unclaimed) = judge_job(job, backend);
    if faults.iter().any(|d| d.severity == Severity::Error) {
        return Err(match unclaimed {
            true => Error::unclaimed("build", faults),
            false => Error::diagnosed("build", faults),
        });
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
        parameters: job.model.parameters(),
        mesh: plan.mesh,
    };
    if let WeightInit::Source(source) = &init {
        let fit = check_shapes(*source, &options.parameters);
        world.agree("build", fit)?;
    }
    let engine = backend.build(&plan, world.clone(), init)?;
    let capability = backend.capability();
    let guarded = Guarded::new(engine, world, backend.name(), capability, options);
    Ok((guarded, plan))
}

//! A job's file, its overrides, and the engine it names.

use std::{path::PathBuf, sync::Arc};

use crate::{
    core::{
        Result,
        config::{JobSource, LoadedJob, load_job},
        engine::Backend,
    },
    data::Hub,
};
use clap::Args;

/// Arguments of every command that takes a job.
#[derive(Debug, Args)]
pub(super) struct JobArgs {
    /// The job, a YAML file
    pub(super) job: PathBuf,
    /// Override a key: --set optimizer.learning_rate=1e-4 (may be repeated)
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(super) overrides: Vec<String>,
}

impl JobArgs {
    /// The checked job and its engine; `more` overrides come last.
    pub(super) fn load(
        &self,
        more: &[String],
        backends: &[Arc<dyn Backend>],
        hub: &Hub,
    ) -> Result<(LoadedJob, Arc<dyn Backend>)> {
        let overrides: Vec<String> = self.overrides.iter().chain(more).cloned().collect();
        load(&JobSource::read(&self.job)?, &overrides, backends, hub)
    }
}

/// Checks a job and finds its engine. Warnings go to the terminal.
pub(super) fn load(
    source: &JobSource,
    overrides: &[String],
    backends: &[Arc<dyn Backend>],
    hub: &Hub,
) -> Result<(LoadedJob, Arc<dyn Backend>)> {
    let borrowed: Vec<&dyn Backend> = backends.iter().map(|b| &**b).collect();
    let job = load_job(source, overrides, &borrowed, hub)?;
    for warning in job.warnings.iter().filter(|_| crate::launch::speaks()) {
        super::output::note(warning);
    }
    let backend = Arc::clone(&backends[job.backend]);
    Ok((job, backend))
}

//! `drivetrain check`.

use std::{process::ExitCode, sync::Arc};

use crate::{
    core::{Result, engine::Backend},
    data::Hub,
    tables::{mebibytes, table},
};
use clap::Args;

use super::job::JobArgs;

#[derive(Debug, Args)]
pub(super) struct CheckArgs {
    #[command(flatten)]
    job: JobArgs,
    /// Print the diagnostics, or the plan, as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &CheckArgs, backends: &[Arc<dyn Backend>]) -> Result<ExitCode> {
    let (job, backend) = match args.job.load(&[], backends, &Hub::from_env().cached_only()) {
        Ok(loaded) => loaded,
        Err(error) if args.json && !error.diagnostics().is_empty() => {
            super::output::json(&serde_json::json!({ "diagnostics": error.diagnostics() }))?;
            return Ok(ExitCode::from(error.kind().exit_code()));
        }
        Err(error) => return Err(error),
    };
    let plan = backend.plan(&job.spec)?;
    if args.json {
        super::output::json(&serde_json::json!({
            "diagnostics": job.warnings,
            "plan": plan,
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let spec = &job.spec;
    println!(
        "{}: no fault. {:?} with {} parameters under {}, {} rank(s)",
        args.job.job.display(),
        spec.model.family,
        spec.model.num_parameters(),
        backend.name(),
        plan.mesh.world_size(),
    );
    let rows = plan
        .collectives
        .iter()
        .map(|c| {
            vec![
                c.operation.clone(),
                c.axis.name().to_owned(),
                mebibytes(c.bytes),
                c.count.to_string(),
            ]
        })
        .collect::<Vec<_>>();
    if !rows.is_empty() {
        println!(
            "{}",
            table(&["collective", "axis", "buffer", "a step"], rows)
        );
    }
    Ok(ExitCode::SUCCESS)
}

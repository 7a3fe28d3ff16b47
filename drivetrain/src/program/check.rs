//! `drivetrain check`.

use std::{process::ExitCode, sync::Arc};

use crate::{
    core::{DType, Result, engine::Backend, mesh::MeshAxis, plan::TrainPlan},
    data::Hub,
    tables::{mebibytes, table},
};
use clap::Args;
use indexmap::IndexMap;

use super::{job::JobArgs, output::line};

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
    let (spec, mesh) = (&job.spec, &plan.mesh);
    let config = &spec.config;
    line(format!(
        "{}: no fault. {:?} with {} parameters under {}, {} rank(s)",
        args.job.job.display(),
        spec.model.family,
        spec.model.num_parameters(),
        backend.name(),
        mesh.world_size(),
    ))?;
    line(format!(
        "{} steps of {} sequences, loss {}, learning rate {:e}",
        config.steps,
        config.batch.global_batch_size,
        format!("{:?}", config.objective.kind).to_lowercase(),
        config.optimizer.learning_rate,
    ))?;
    let master = if config.precision.compute == DType::F64 {
        DType::F64
    } else {
        DType::F32
    };
    let weights = (spec.model.num_parameters() * master.size()) as u64;
    line(format!(
        "{} of {master} weights, {} of moments, {} of them on a rank",
        mebibytes(weights),
        mebibytes(2 * weights),
        mebibytes(2 * weights / mesh.size(MeshAxis::DataShard) as u64),
    ))?;
    let rows = collectives(&plan);
    if !rows.is_empty() {
        line(table(
            &[
                "collective",
                "axis",
                "largest buffer",
                "a step",
                "bytes a step",
            ],
            rows,
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// A row an operation and axis.
fn collectives(plan: &TrainPlan) -> Vec<Vec<String>> {
    let mut sums: IndexMap<(&str, &str), (u64, usize, u64)> = IndexMap::new();
    for c in &plan.collectives {
        let (largest, count, bytes) = sums.entry((&c.operation, c.axis.name())).or_default();
        *largest = c.bytes.max(*largest);
        *count += c.count;
        *bytes += c.bytes * c.count as u64;
    }
    sums.iter()
        .map(|((operation, axis), (largest, count, bytes))| {
            vec![
                (*operation).to_owned(),
                (*axis).to_owned(),
                mebibytes(*largest),
                count.to_string(),
                mebibytes(*bytes),
            ]
        })
        .collect()
}

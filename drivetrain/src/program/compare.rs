//! `drivetrain compare`.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};

use crate::{
    core::{Error, ErrorKind, Result, engine::Backend},
    data::Hub,
    find_backend, report,
    run::{CompareOptions, compare},
    tables::{PARITY_HEADER, RUN_HEADER, parity_rows, run_rows, table},
};
use clap::Args;

use super::{
    job::JobArgs,
    output::{line, spare},
    progress::Progress,
};

#[derive(Debug, Args)]
pub(super) struct CompareArgs {
    #[command(flatten)]
    job: JobArgs,
    /// Engines; the exact one (`reference`) is held for true where it is among them, else the first. Its gradients
    /// of three steps and its weights stay in memory: 16 bytes a parameter, 32 for `reference`; 8 more of each other
    #[arg(long, value_delimiter = ',')]
    backends: Vec<String>,
    /// Optimizer steps of each engine
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// The HTML report; by default compare.html in the job's output
    #[arg(long)]
    report: Option<PathBuf>,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &CompareArgs, backends: &[Arc<dyn Backend>]) -> Result<ExitCode> {
    let names = if args.backends.is_empty() {
        backends
            .iter()
            .filter(|b| !b.is_exact())
            .map(|b| b.name().to_owned())
            .collect()
    } else {
        args.backends.clone()
    };
    if let Some(twice) = (1..names.len()).find(|&n| names[..n].contains(&names[n])) {
        let message = "an engine is named twice: it would be compared with itself";
        return Err(Error::new(ErrorKind::Config, "compare", message)
            .with("found", format!("--backends {}", args.backends.join(",")))
            .help(format!("name `{}` once", names[twice])));
    }
    let hub = Hub::from_env();
    let jobs = names
        .iter()
        .map(|name| {
            let mut more = vec![format!("backend={name}")];
            if find_backend(backends, name)?.is_exact() {
                // One rank: the layout does not change what it computes.
                more.push("parallel={}".to_owned());
                more.push("precision={compute: f64}".to_owned());
            }
            args.job.load(&more, backends, &hub)
        })
        .collect::<Result<Vec<_>>>()?;
    if let Some(report) = &args.report {
        let (job, _) = &jobs[0];
        let data = &job.spec.config.data;
        let mut inputs: Vec<(&str, &Path)> = vec![
            ("the job", &args.job.job),
            ("data.train", &data.train),
            ("the model", &job.model_folder),
        ];
        inputs.extend(data.validation.iter().map(|v| ("data.validation", &**v)));
        spare("--report", report, &inputs)?;
    }
    let progress = Progress::new(args.steps, args.json);
    let result = compare(
        &jobs,
        &CompareOptions { steps: args.steps },
        &|backend, step, loss| {
            progress.say(step, &format!("{backend}: loss {loss:.4}"));
        },
    )?;
    progress.finish();
    let path = args
        .report
        .clone()
        .unwrap_or_else(|| jobs[0].0.spec.config.output.join("compare.html"));
    let title = args.job.job.display().to_string();
    report::write_compare(&path, &title, &result)?;
    if args.json {
        super::output::json(&result)?;
    } else {
        line(table(&RUN_HEADER, run_rows(&result.runs)))?;
        line(table(&PARITY_HEADER, parity_rows(&result.parity)))?;
        let verdict = match (result.parity.is_empty(), result.agrees()) {
            (true, _) => "one engine only: nothing to compare it with",
            (false, true) => "the engines agree: every comparison is within its tolerance",
            (false, false) => "the engines DISAGREE",
        };
        line(format!("{verdict}\nreport: {}", path.display()))?;
    }
    let agrees = result.parity.is_empty() || result.agrees();
    Ok(if agrees {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(ErrorKind::Parity.exit_code())
    })
}

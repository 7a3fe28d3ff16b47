//! `drivetrain train`.

use std::{process::ExitCode, sync::Arc};

use crate::{
    core::{
        Result,
        config::{METRICS, MODEL},
        engine::Backend,
    },
    data::Hub,
    launch,
    run::{TrainOptions, train},
    trace::{StepRanges, Trace},
};
use clap::Args;

use super::{
    interrupt::on_interrupt,
    job::JobArgs,
    output::{line, note},
    processes::ProcessArgs,
    progress::Progress,
};

#[derive(Debug, Args)]
pub(super) struct TrainArgs {
    #[command(flatten)]
    job: JobArgs,
    /// Continue from the newest checkpoint of the job's output
    #[arg(long, conflicts_with = "overwrite")]
    resume: bool,
    /// Start anew where the job's output holds another run, whose checkpoints, metrics and model are lost
    #[arg(long)]
    overwrite: bool,
    /// Write a timeline of these steps (3 or 2,10-12) to trace.json in the job's output: what each rank computes, its
    /// collective operations, its memory. Perfetto (ui.perfetto.dev) and Chrome show it
    #[arg(long, value_name = "STEPS")]
    trace: Option<StepRanges>,
    /// Print a JSON object a step on stdout
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    processes: ProcessArgs,
}

impl TrainArgs {
    /// The steps to look at.
    pub(super) fn trace(&self) -> Option<Arc<Trace>> {
        self.trace.clone().map(Trace::new)
    }
}

pub(super) fn run(
    args: &TrainArgs,
    backends: &[Arc<dyn Backend>],
    trace: Option<Arc<Trace>>,
) -> Result<ExitCode> {
    let (mut job, backend) = args.job.load(&[], backends, &Hub::from_env())?;
    if let Some(code) = args.processes.launch()? {
        return Ok(code);
    }
    let ranks = launch::find_ranks(&mut job.spec.config)?;
    let first = ranks.is_first();
    let options = Arc::new(TrainOptions {
        resume: args.resume,
        overwrite: args.overwrite,
        ranks,
        trace,
        ..TrainOptions::default()
    });
    let mut progress = first.then(|| Progress::new(job.spec.config.steps, args.json));
    // The handler outlives the run, whose end leaves the world of ranks.
    let to_stop = Arc::downgrade(&options);
    on_interrupt(move || {
        if first {
            note("stopping after this step, with a checkpoint; again to end at once");
        }
        if let Some(options) = to_stop.upgrade() {
            options.ask_to_stop();
        }
    })?;
    let summary = match &mut progress {
        Some(progress) => train(&job, &*backend, &options, progress)?,
        None => train(&job, &*backend, &options, &mut ())?,
    };
    let Some(progress) = progress else {
        return Ok(ExitCode::SUCCESS);
    };
    progress.finish();
    let output = &job.spec.config.output;
    if args.json {
        super::output::json(&summary)?;
    } else if summary.stopped {
        line(format!(
            "stopped after step {}; continue with --resume",
            summary.step
        ))?;
    } else {
        let done = match summary.last_loss {
            Some(loss) => format!("{} steps, last loss {loss:.4}", summary.step),
            None => format!(
                "no step was left to make: the checkpoint is of step {} already",
                summary.step
            ),
        };
        line(format!(
            "{done}, under {}; model in {}, metrics in {}",
            backend.name(),
            output.join(MODEL).display(),
            output.join(METRICS).display(),
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

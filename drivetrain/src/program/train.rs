//! `drivetrain train`.

use std::{process::ExitCode, sync::Arc};

use crate::{
    core::{Error, ErrorKind, Result, engine::Backend},
    data::Hub,
    run::{METRICS, MODEL, TrainOptions, train},
};
use clap::Args;

use super::{job::JobArgs, progress::Progress};

#[derive(Debug, Args)]
pub(super) struct TrainArgs {
    #[command(flatten)]
    job: JobArgs,
    /// Continue from the newest checkpoint of the job's output
    #[arg(long)]
    resume: bool,
    /// Print a JSON object a step on stdout
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &TrainArgs, backends: &[Arc<dyn Backend>]) -> Result<ExitCode> {
    let (job, backend) = args.job.load(&[], backends, &Hub::from_env())?;
    let options = Arc::new(TrainOptions {
        resume: args.resume,
        ..TrainOptions::default()
    });
    let mut progress = Progress::new(job.spec.config.steps, args.json);
    stop_on_interrupt(&options)?;
    let summary = train(&job, &*backend, &options, &mut progress)?;
    progress.finish();
    let output = &job.spec.config.output;
    for (count, what) in [
        (summary.skipped_sequences, "left out"),
        (summary.truncated_sequences, "cut"),
    ] {
        if count > 0 {
            eprintln!("{count} sequences were {what} for their length");
        }
    }
    if args.json {
        super::output::json(&summary)?;
    } else if summary.stopped {
        println!(
            "stopped after step {}; continue with --resume",
            summary.step
        );
    } else {
        println!(
            "{} steps under {}, last loss {}; model in {}, metrics in {}",
            summary.step,
            backend.name(),
            summary
                .last_loss
                .map_or("-".to_owned(), |l| format!("{l:.4}")),
            output.join(MODEL).display(),
            output.join(METRICS).display(),
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// The first Ctrl-C saves and stops after the step in progress; the second ends the process at once.
fn stop_on_interrupt(options: &Arc<TrainOptions>) -> Result<()> {
    let options = Arc::clone(options);
    ctrlc::set_handler(move || {
        if options.stop.load(std::sync::atomic::Ordering::Relaxed) {
            std::process::exit(i32::from(ErrorKind::Interrupted.exit_code()));
        }
        eprintln!("stopping after this step, with a checkpoint; again to end at once");
        options.ask_to_stop();
    })
    .map_err(|cause| {
        Error::new(
            ErrorKind::Device,
            "handle_interrupt",
            "cannot listen for Ctrl-C",
        )
        .caused_by(cause)
    })
}

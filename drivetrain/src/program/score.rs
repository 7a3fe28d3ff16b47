//! `drivetrain score`.

use std::{io::Write, path::PathBuf, process::ExitCode, sync::Arc};

use crate::{
    core::{Error, ErrorKind, Result, config::JobSource, engine::Backend, files::AtomicFile},
    data::Hub,
    run::{ScoreOptions, score},
};
use clap::Args;

#[derive(Debug, Args)]
pub(super) struct ScoreArgs {
    /// A Hugging Face folder, or a hub id
    #[arg(long)]
    model: String,
    /// The engine
    #[arg(long)]
    backend: String,
    /// Sequences, a jsonl file
    #[arg(long)]
    data: PathBuf,
    /// Where the scores go, a line a sequence
    #[arg(long)]
    out: PathBuf,
    /// Divides the logits before log-prob and entropy
    #[arg(long, default_value_t = 1.0)]
    temperature: f64,
    /// Sequences of a batch over all ranks
    #[arg(long, default_value_t = 8)]
    batch_size: usize,
    /// Override a key of the job: --set parallel.data_parallel_size=2 (may be repeated)
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Print the count as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &ScoreArgs, backends: &[Arc<dyn Backend>]) -> Result<ExitCode> {
    let job = serde_json::json!({
        "model": args.model,
        "backend": args.backend,
        "steps": 1,
        // Required of a job; scoring writes nothing there.
        "output": ".",
        "data": { "train": args.data, "shuffle": false },
        "batch": { "global_batch_size": args.batch_size },
        "objective": { "temperature": args.temperature },
    });
    // JSON is YAML.
    let source = JobSource::text(job.to_string(), "");
    let (job, backend) = super::job::load(&source, &args.overrides, backends, &Hub::from_env())?;
    let options = ScoreOptions {
        temperature: job.spec.config.objective.temperature,
        entropy: true,
    };
    let mut file = AtomicFile::create(&args.out)?;
    let failed = |cause: Box<dyn std::error::Error + Send + Sync>| {
        Error::new(ErrorKind::File, "write_scores", "cannot write the scores")
            .with("file", args.out.display())
            .caused_by(cause)
    };
    let count = score(&job, &*backend, &options, &mut |scores| {
        let line = serde_json::to_string(&scores).map_err(|e| failed(e.into()))?;
        writeln!(file, "{line}").map_err(|e| failed(e.into()))
    })?;
    file.commit()?;
    if args.json {
        super::output::json(&serde_json::json!({ "sequences": count, "out": args.out }))?;
    } else {
        println!(
            "{count} sequences scored under {}: {}",
            backend.name(),
            args.out.display()
        );
    }
    Ok(ExitCode::SUCCESS)
}

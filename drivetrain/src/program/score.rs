//! `drivetrain score`.

use std::{
    io::Write,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use crate::{
    core::{
        Error, ErrorKind, Result,
        config::JobSource,
        engine::{Backend, is_temperature},
        files::AtomicFile,
    },
    data::Hub,
    launch,
    run::{ScoreOptions, score},
};
use clap::Args;

use super::{
    interrupt::on_interrupt,
    output::{json, line, spare},
    processes::ProcessArgs,
};

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
    /// Where the scores go: {"log_probs": [..], "entropy": [..]} a sequence, in nats, a number a token, in the
    /// order of the data. The first token's are 0; every token is scored, whatever the loss mask. A line with
    /// `chosen` and `rejected` is two sequences
    #[arg(long)]
    out: PathBuf,
    /// Divides the logits before log-prob and entropy
    #[arg(long, default_value_t = 1.0, value_parser = temperature)]
    temperature: f64,
    /// Sequences of a batch over all ranks
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=16_777_216))]
    batch_size: u32,
    /// Override a key of the job: --set parallel.data_parallel_size=2 (may be repeated)
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Print the count as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    processes: ProcessArgs,
}

/// Keys of a job that scoring reads, and `--set` may give.
const READ: [&str; 11] = [
    "backends",
    "batch",
    "data.max_length",
    "data.overlong",
    "device",
    "from_scratch",
    "logits_budget_bytes",
    "parallel",
    "precision",
    "seed",
    "timeout_seconds",
];

pub(super) fn run(args: &ScoreArgs, backends: &[Arc<dyn Backend>]) -> Result<ExitCode> {
    args.overrides.iter().try_for_each(|text| is_read(text))?;
    // Required of a job; scoring writes nothing there.
    let nowhere = format!("drivetrain-score-{}", std::process::id());
    let job = serde_json::json!({
        "model": args.model,
        "backend": args.backend,
        "steps": 1,
        "output": std::env::temp_dir().join(nowhere),
        "data": { "train": args.data, "shuffle": false },
        "batch": { "global_batch_size": args.batch_size },
        "objective": { "temperature": args.temperature },
    });
    // JSON is YAML.
    let source = JobSource::text(job.to_string(), "");
    let (mut job, backend) =
        super::job::load(&source, &args.overrides, backends, &Hub::from_env())?;
    if let Some(code) = args.processes.launch()? {
        return Ok(code);
    }
    let inputs: [(&str, &Path); 2] = [("--data", &args.data), ("the model", &job.model_folder)];
    spare("--out", &args.out, &inputs)?;
    let ranks = launch::find_ranks(&mut job.spec.config)?;
    let options = ScoreOptions {
        temperature: job.spec.config.objective.temperature,
        entropy: true,
        ranks: ranks.clone(),
    };
    let stop = Arc::new(AtomicBool::new(false));
    let to_stop = Arc::clone(&stop);
    on_interrupt(move || to_stop.store(true, Ordering::Relaxed))?;
    let created = ranks.is_first().then(|| AtomicFile::create(&args.out));
    let mut file = ranks.agree("create_scores", created.transpose())?;
    let failed = |cause: Box<dyn std::error::Error + Send + Sync>| {
        Error::new(ErrorKind::File, "write_scores", "cannot write the scores")
            .with("file", args.out.display())
            .caused_by(cause)
    };
    let count = score(&job, &*backend, &options, &mut |scores| {
        if stop.load(Ordering::Relaxed) {
            let message = "stopped as asked; nothing is left of the scores";
            return Err(Error::new(ErrorKind::Interrupted, "score", message));
        }
        let line = serde_json::to_string(&scores).map_err(|e| failed(e.into()))?;
        let Some(file) = &mut file else { return Ok(()) };
        writeln!(file, "{line}").map_err(|e| failed(e.into()))
    })?;
    let Some(file) = file else {
        return Ok(ExitCode::SUCCESS);
    };
    file.commit()?;
    if args.json {
        json(&serde_json::json!({ "sequences": count, "out": args.out }))?;
    } else {
        line(format!(
            "{count} sequences scored under {}: {}",
            backend.name(),
            args.out.display()
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn temperature(text: &str) -> std::result::Result<f64, String> {
    let number = text.parse().ok().filter(|&t| is_temperature(t));
    number.ok_or_else(|| "a number above 0 is wanted, in the range of f32".to_owned())
}

/// What `--set` gives must have an effect.
fn is_read(text: &str) -> Result<()> {
    let key = text.split('=').next().unwrap_or_default().trim();
    let within = |read: &str| {
        key.strip_prefix(read)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    match READ.iter().any(|read| within(read)) {
        true => Ok(()),
        false => Err(Error::new(
            ErrorKind::Config,
            "score",
            "a key that scoring does not read, or that has an option of its own",
        )
        .with("found", format!("--set {text}"))
        .with("expected", READ.join(", "))
        .help("leave it out, or use --model, --backend, --data or --temperature")),
    }
}

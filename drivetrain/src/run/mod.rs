//! What the commands do, as functions: train, score, compare, export.

mod compare;
mod evidence;
mod export;
mod inspect;
mod output;
mod parity;
mod score;
mod train;

pub use compare::{BackendRun, CompareOptions, CompareReport, compare};
pub use export::export_checkpoint;
pub use inspect::{
    CheckpointContents, Contents, FileContents, ModelContents, PieceContents, StoreContents,
    TensorContents, inspect,
};
pub use parity::{PARITY_STEPS, Parity};
pub use score::{ScoreOptions, SequenceScores, score};
pub use train::{TRACE, TrainOptions, TrainSummary, train};

use std::{path::Path, sync::Arc, time::Duration};

use drivetrain_core::{
    Result,
    config::{JobConfig, LoadedJob},
    objective::Objective,
    trainer::{BatchSource, check_columns},
};
use drivetrain_data::{Dataset, DatasetOptions};

/// A data file of a job. How many sequences are too long, and so not what the file says, is logged as a warning.
fn open_data(job: &LoadedJob, path: &Path) -> Result<Dataset> {
    let dataset = Dataset::open(path, &DatasetOptions::of_job(&job.spec, &job.model_folder))?;
    for (count, what) in [
        (dataset.skipped(), "left out"),
        (dataset.truncated(), "cut"),
    ] {
        if count > 0 {
            let path = path.display();
            tracing::warn!("{path}: {count} sequences were {what} for their length");
        }
    }
    Ok(dataset)
}

/// The training data, of which the first batch must bring what the objective reads.
fn open_training_data(job: &LoadedJob, objective: &dyn Objective) -> Result<Arc<Dataset>> {
    let config = &job.spec.config;
    let path = &config.data.train;
    let dataset = Arc::new(open_data(job, path)?);
    let mut batches = dataset.batches(config.batch.global_batch_size, config.seed)?;
    check_columns(&batches.next_batch()?, objective).map_err(|error| {
        let error = error.with("file", path.display());
        match error.remedy() {
            Some(_) => error,
            None => error.help(
                "give every line the fields that objective.kind reads, or choose another kind",
            ),
        }
    })?;
    Ok(dataset)
}

/// The timeout of a job's collectives.
fn timeout(config: &JobConfig) -> Duration {
    Duration::from_secs_f64(config.timeout_seconds)
}

/// Threads that a job's ranks compute with, all together.
fn total_threads(config: &JobConfig, ranks: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    config
        .parallel
        .threads_per_rank
        .map_or(cores, |t| (t * ranks).min(cores))
}

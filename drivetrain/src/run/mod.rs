//! What the commands do, as functions: train, score, compare, export.

mod compare;
mod export;
mod parity;
mod score;
mod scores;
mod train;

pub use compare::{BackendRun, CompareOptions, CompareReport, compare};
pub use export::export_checkpoint;
pub use parity::{PARITY_STEPS, Parity};
pub use score::{ScoreOptions, SequenceScores, score};
pub use train::{CHECKPOINTS, METRICS, MODEL, TrainOptions, TrainSummary, train};

use std::time::Duration;

use drivetrain_core::config::JobConfig;

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

//! What decides how a file becomes sequences.

use std::path::{Path, PathBuf};

use drivetrain_core::config::{JobSpec, Overlong};

/// How a file becomes sequences.
#[derive(Debug, Clone, PartialEq)]
pub struct DatasetOptions {
    /// V: ids are below it.
    pub vocab_size: usize,
    /// Longest sequence, in tokens.
    pub max_length: usize,
    /// What happens to longer ones. A group of which one is left out is left out whole.
    pub overlong: Overlong,
    /// Whether each epoch is a new order.
    pub shuffle: bool,
    /// The folder with `tokenizer.json`, `tokenizer_config.json` and perhaps `chat_template.jinja`; read only
    /// when a line holds text.
    pub tokenizer: PathBuf,
    /// Bytes of sequences that are kept in memory; what is over is read again when its turn comes.
    pub cache_bytes: usize,
}

impl DatasetOptions {
    /// What a job asks for, with the tokenizer of its model's folder.
    pub fn of_job(job: &JobSpec, model_folder: &Path) -> Self {
        let data = &job.config.data;
        Self {
            vocab_size: job.model.vocab_size,
            max_length: data.max_length.unwrap_or(job.model.max_position_embeddings),
            overlong: data.overlong,
            shuffle: data.shuffle,
            tokenizer: model_folder.to_owned(),
            cache_bytes: 1 << 30,
        }
    }
}

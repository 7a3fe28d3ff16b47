//! Whose checkpoint it is.

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

use crate::{Error, ErrorKind, Result, model::ModelSpec};

/// What a checkpoint belongs to; compared before anything is read or written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// [`ModelSpec::fingerprint`].
    pub model: String,
    /// The model in words, for messages.
    pub summary: String,
    /// Who wrote it; for information, since any engine reads it.
    pub backend: String,
    /// The training data, as the job names it.
    pub data: String,
}

impl Identity {
    /// The identity of a job that trains `model` on the data that `data` names.
    pub fn new(model: &ModelSpec, data: impl Into<String>) -> Self {
        Self {
            model: model.fingerprint(),
            summary: format!(
                "{:?}, {} layers, hidden size {}, vocabulary {}, {} parameters",
                model.family,
                model.num_layers(),
                model.hidden_size,
                model.vocab_size,
                model.num_parameters(),
            ),
            backend: String::new(),
            data: data.into(),
        }
    }

    /// The same, written by this backend.
    #[must_use]
    pub fn written_by(mut self, backend: &str) -> Self {
        backend.clone_into(&mut self.backend);
        self
    }

    /// Whether a job of this identity may continue from a checkpoint of identity `found`.
    ///
    /// # Errors
    /// `Checkpoint` if the model or the data is another.
    pub fn accept(&self, found: &Self) -> Result<()> {
        self.accept_model(found)?;
        match self.data == found.data {
            true => Ok(()),
            false => Err(another("data set", &found.data, &self.data)),
        }
    }

    /// Whether the checkpoint's weights are of this identity's model, whatever they were trained on.
    ///
    /// # Errors
    /// `Checkpoint` if the model is another.
    pub fn accept_model(&self, found: &Self) -> Result<()> {
        let describe = |id: &Self| format!("{} (fingerprint {})", id.summary, id.model);
        match self.model == found.model {
            true => Ok(()),
            false => Err(another("model", &describe(found), &describe(self))),
        }
    }
}

fn another(what: &str, found: &str, expected: &str) -> Error {
    let message = format!("the checkpoint belongs to another {what}");
    Error::new(ErrorKind::Checkpoint, "open_checkpoint", message)
        .with("found", found)
        .with("expected", expected)
        .help("give the checkpoint's own job, or another folder for this job's checkpoints")
}

impl ModelSpec {
    /// A hash of all that decides what the weights mean: sizes, layers, RoPE, and every parameter's name and
    /// shape. Not of the dtype that exports use, nor of config keys that change nothing.
    pub fn fingerprint(&self) -> String {
        let mut spec = self.clone();
        spec.config.clear();
        spec.dtype = crate::DType::F32;
        let tensors: Vec<_> = (spec.parameters().into_iter())
            .map(|p| (p.name, p.shape))
            .collect();
        let text = serde_json::json!([spec, tensors]).to_string();
        format!("{:032x}", xxh3_128(text.as_bytes()))
    }
}

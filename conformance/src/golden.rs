//! Values of Hugging Face transformers on tiny models, computed in f64: what the oracle itself, and every
//! engine, is measured against. `golden/README.md` says how they were made.

use std::path::{Path, PathBuf};

use drivetrain_core::{
    DType, Error, ErrorKind, Result,
    batch::{Batch, BatchBuilder},
    config::OptimizerConfig,
    model::ModelSpec,
    weights::MemoryWeights,
};
use indexmap::IndexMap;
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;

/// The models, by folder name.
pub const MODELS: [&str; 7] = [
    "llama_mha",
    "llama_gqa_rope3",
    "mistral_swa8",
    "qwen2_bias_tied",
    "qwen3_qknorm",
    "mixtral_moe",
    "qwen3_moe",
];

/// One model with its weights, batch and values.
#[derive(Debug)]
pub struct Golden {
    /// Folder name.
    pub name: &'static str,
    /// The model.
    pub model: ModelSpec,
    /// Its weights.
    pub weights: MemoryWeights,
    /// Three sequences with their loss mask.
    pub batch: Batch,
    /// `log p(token_t | tokens_<t)`, `[T]`, 0 for first tokens.
    pub log_probs: Vec<f64>,
    /// Entropy of the distribution that predicted token t, `[T]`, 0 for first tokens.
    pub entropy: Vec<f64>,
    /// Gradient of the mean NLL by parameter.
    pub gradients: IndexMap<String, Vec<f64>>,
    /// Losses, norms and weights of three AdamW steps, by decay rule.
    pub runs: Vec<GoldenRun>,
    /// AdamW and clip of those steps.
    pub optimizer: OptimizerConfig,
}

/// Three steps under one decay rule.
#[derive(Debug)]
pub struct GoldenRun {
    /// Whether 1-D parameters decay.
    pub decay_1d: bool,
    /// Loss before each step, and after the last.
    pub losses: Vec<f64>,
    /// Gradient norm of each step.
    pub grad_norms: Vec<f64>,
    /// Weights after the last; empty where this rule's weights are not kept.
    pub weights: IndexMap<String, Vec<f64>>,
}

#[derive(Deserialize)]
struct Facts {
    adamw: AdamwFacts,
    clip_grad_norm: f64,
    losses_f64: Vec<f64>,
    grad_norms_f64: Vec<f64>,
    losses_f64_nodecay1d: Vec<f64>,
    grad_norms_f64_nodecay1d: Vec<f64>,
}

#[derive(Deserialize)]
struct AdamwFacts {
    lr: f64,
    betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
}

impl Golden {
    /// Reads a model of [`MODELS`] from the folder that comes with this crate.
    ///
    /// # Errors
    /// `File` if the crate's sources are not where it was compiled.
    pub fn read(name: &'static str) -> Result<Self> {
        let folder = root().join(name);
        let model = ModelSpec::from_folder(&folder)?;
        let facts: Facts = json(&folder.join("golden.json"))?;
        let weights = tensors(&folder.join("model.safetensors"))?;
        let values = tensors(&folder.join("golden.safetensors"))?;
        let part = |prefix: &str| {
            let of = |(n, t): (&String, &Tensor)| {
                Some((n.strip_prefix(prefix)?.to_owned(), t.values.clone()))
            };
            values.iter().filter_map(of).collect::<IndexMap<_, _>>()
        };
        let lengths = lengths(&values["attention_mask"]);
        let optimizer = OptimizerConfig {
            learning_rate: facts.adamw.lr,
            beta1: facts.adamw.betas.0,
            beta2: facts.adamw.betas.1,
            epsilon: facts.adamw.eps,
            weight_decay: facts.adamw.weight_decay,
            decay_1d: false,
            max_grad_norm: Some(facts.clip_grad_norm),
        };
        Ok(Self {
            name,
            batch: batch(&values, &lengths)?,
            log_probs: packed(&values["logprobs_f64"], &lengths),
            entropy: packed(&values["entropy_f64"], &lengths),
            gradients: part("grad."),
            runs: vec![
                GoldenRun {
                    decay_1d: false,
                    losses: facts.losses_f64_nodecay1d,
                    grad_norms: facts.grad_norms_f64_nodecay1d,
                    weights: part("after3_nd."),
                },
                GoldenRun {
                    decay_1d: true,
                    losses: facts.losses_f64,
                    grad_norms: facts.grad_norms_f64,
                    weights: part("after3."),
                },
            ],
            optimizer,
            weights: memory(&weights)?,
            model,
        })
    }

    /// A model's description, without reading its tensors.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn model(name: &str) -> Result<ModelSpec> {
        ModelSpec::from_folder(&root().join(name))
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden")
}

struct Tensor {
    shape: Vec<usize>,
    values: Vec<f64>,
}

fn tensors(path: &Path) -> Result<IndexMap<String, Tensor>> {
    let bytes = read(path)?;
    let file = SafeTensors::deserialize(&bytes).map_err(|e| fault(path).caused_by(e))?;
    let mut all = IndexMap::new();
    for (name, view) in file.tensors() {
        let data = view.data();
        let values = match view.dtype() {
            Dtype::F32 => elements(data, |b| f64::from(f32::from_le_bytes(b))),
            Dtype::F64 => elements(data, f64::from_le_bytes),
            Dtype::I64 => elements(data, |b| i64::from_le_bytes(b) as f64),
            other => {
                return Err(fault(path)
                    .with("tensor", &name)
                    .with("dtype", format!("{other:?}")));
            }
        };
        let shape = view.shape().to_vec();
        all.insert(name, Tensor { shape, values });
    }
    Ok(all)
}

fn elements<const N: usize>(bytes: &[u8], of: impl Fn([u8; N]) -> f64) -> Vec<f64> {
    bytes.as_chunks().0.iter().map(|&b| of(b)).collect()
}

fn memory(tensors: &IndexMap<String, Tensor>) -> Result<MemoryWeights> {
    let mut weights = MemoryWeights::new();
    for (name, tensor) in tensors {
        weights.insert(name, &tensor.shape, DType::F32, tensor.values.clone())?;
    }
    Ok(weights)
}

fn lengths(attention_mask: &Tensor) -> Vec<usize> {
    let rows = attention_mask.values.chunks(attention_mask.shape[1]);
    rows.map(|row| row.iter().sum::<f64>() as usize).collect()
}

fn batch(values: &IndexMap<String, Tensor>, lengths: &[usize]) -> Result<Batch> {
    let (ids, mask) = (&values["input_ids"], &values["loss_mask"]);
    let width = ids.shape[1];
    let mut builder = BatchBuilder::new();
    for (s, &n) in lengths.iter().enumerate() {
        let row = s * width..s * width + n;
        let tokens: Vec<_> = ids.values[row.clone()].iter().map(|&t| t as u32).collect();
        let scored: Vec<_> = mask.values[row].iter().map(|&m| m != 0.0).collect();
        builder.push(&tokens, Some(&scored))?;
    }
    builder.build()
}

/// From `[B, longest - 1]`, where column i is about token i + 1, to `[T]`.
fn packed(padded: &Tensor, lengths: &[usize]) -> Vec<f64> {
    let rows = padded.values.chunks(padded.shape[1]).zip(lengths);
    rows.flat_map(|(row, &n)| std::iter::once(0.0).chain(row[..n - 1].iter().copied()))
        .collect()
}

fn json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T> {
    serde_json::from_slice(&read(path)?).map_err(|e| fault(path).caused_by(e))
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|e| fault(path).caused_by(e))
}

fn fault(path: &Path) -> Error {
    Error::new(ErrorKind::File, "read_golden", "cannot read a golden file")
        .with("file", path.display())
        .help("run the suite where the sources of drivetrain-conformance lie")
}

//! Weights streamed into a Hugging Face folder that `transformers` loads.

use std::{
    fs,
    path::{Path, PathBuf},
};

use indexmap::IndexMap;
use serde_json::{Map, Value, json};

use super::{INDEX_FILE, SINGLE_FILE};
use crate::{
    DType, Error, ErrorKind, Result,
    files::real,
    model::{ModelSpec, ParameterSpec},
    staged_folder::StagedFolder,
    tensor_file::{TensorFileWriter, encode},
    weights::{TensorSlice, WeightManifest, WeightSink, not_finite, overflow},
};

/// Files beside the weights that belong to the model and are copied as they are.
const COMPANIONS: [&str; 13] = [
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
];

/// How a folder is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HfWriterOptions {
    /// Element type of all tensors; the model's own ([`ModelSpec::dtype`]) if `None`.
    pub dtype: Option<DType>,
    /// Bytes of data after which a new shard begins; a larger tensor is a shard of its own.
    pub shard_bytes: u64,
    /// A folder whose tokenizer, chat template and generation config are copied.
    pub source_folder: Option<PathBuf>,
    /// Whether an infinite weight, or a NaN, is an error.
    pub finite: bool,
}

impl Default for HfWriterOptions {
    fn default() -> Self {
        Self {
            dtype: None,
            shard_bytes: 4 << 30,
            source_folder: None,
            finite: false,
        }
    }
}

/// Writes `config.json` (as it was read, with its dtype made true), the weights, and the model's companions.
///
/// Written beside the target, synced, and renamed at [`commit`](WeightSink::commit): the folder appears whole or
/// not at all. For one rank; the others take a [`DiscardingSink`](crate::weights::DiscardingSink). Holds no weights but the bucket it is
/// given. A NaN is written as it is unless only finite weights are wanted; a finite value that the dtype cannot
/// hold is an error.
#[derive(Debug)]
pub struct HfWriter {
    target: PathBuf,
    model: ModelSpec,
    options: HfWriterOptions,
    open: Option<OpenExport>,
}

#[derive(Debug)]
struct OpenExport {
    folder: StagedFolder,
    shards: Vec<Shard>,
    /// The shard of each tensor that is still to come.
    pending: IndexMap<String, usize>,
}

#[derive(Debug)]
struct Shard {
    file: String,
    tensors: Vec<ParameterSpec>,
    /// Open from its first tensor to its last.
    writer: Option<TensorFileWriter>,
    num_pending: usize,
}

impl HfWriter {
    /// A writer to `target`, of which an earlier export is replaced.
    ///
    /// # Errors
    /// `Config` if the target is the source folder, which would be overwritten;
    /// `File` if the target cannot be written, is a file, or a folder with anything that an export does not write; `Unsupported`
    /// for a dtype other than f64, f32, bf16 and f16.
    pub fn new(
        target: impl Into<PathBuf>,
        model: &ModelSpec,
        options: HfWriterOptions,
    ) -> Result<Self> {
        let writer = Self {
            target: target.into(),
            model: model.clone(),
            options,
            open: None,
        };
        let dtype = writer.dtype();
        if !matches!(dtype, DType::F64 | DType::F32 | DType::Bf16 | DType::F16) {
            let message = "weights cannot be written in this dtype";
            return Err(
                Error::new(ErrorKind::Unsupported, "export_weights", message)
                    .with("found", dtype)
                    .with("supported", "f64, f32, bf16, f16"),
            );
        }
        if let Some(source) = &writer.options.source_folder
            && real(source) == real(&writer.target)
        {
            let message = "the place of the export is the model it comes from";
            return Err(Error::new(ErrorKind::Config, "export_weights", message)
                .with("file", writer.target.display())
                .help("choose another place"));
        }
        check_replaceable(&writer.target)?;
        // A place that cannot be written is found out now, not after the training.
        drop(StagedFolder::begin(&writer.target)?);
        Ok(writer)
    }

    fn dtype(&self) -> DType {
        self.options.dtype.unwrap_or(self.model.dtype)
    }

    fn start(&mut self, manifest: &WeightManifest) -> Result<()> {
        let expected = self.model.parameters();
        let same =
            |(a, b): (&ParameterSpec, &ParameterSpec)| a.name == b.name && a.shape == b.shape;
        if manifest.tensors.len() != expected.len()
            || !manifest.tensors.iter().zip(&expected).all(same)
        {
            let message = "the tensors announced are not the model's parameters in their order";
            return Err(Error::new(ErrorKind::Defect, "export_weights", message)
                .with("found", manifest.tensors.len())
                .with("expected", expected.len()));
        }
        check_replaceable(&self.target)?;
        let shards = self.shards(expected);
        let pending = (shards.iter().enumerate())
            .flat_map(|(i, shard)| shard.tensors.iter().map(move |t| (t.name.clone(), i)))
            .collect();
        self.open = Some(OpenExport {
            folder: StagedFolder::begin(&self.target)?,
            shards,
            pending,
        });
        Ok(())
    }

    /// Tensors in order, a new shard where one would grow over the limit.
    fn shards(&self, tensors: Vec<ParameterSpec>) -> Vec<Shard> {
        let mut groups: Vec<(u64, Vec<ParameterSpec>)> = Vec::new();
        for tensor in tensors {
            let bytes = (tensor.num_elements() * self.dtype().size()) as u64;
            match groups.last_mut() {
                Some((size, group)) if *size + bytes <= self.options.shard_bytes => {
                    *size += bytes;
                    group.push(tensor);
                }
                _ => groups.push((bytes, vec![tensor])),
            }
        }
        let count = groups.len();
        (groups.into_iter().enumerate())
            .map(|(i, (_, tensors))| Shard {
                file: match count {
                    1 => SINGLE_FILE.to_owned(),
                    _ => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
                },
                num_pending: tensors.len(),
                tensors,
                writer: None,
            })
            .collect()
    }

    fn receive(&mut self, tensor: &TensorSlice<'_>) -> Result<()> {
        let dtype = self.dtype();
        let defect = |message: &str| {
            Error::new(ErrorKind::Defect, "export_weights", message).with("tensor", tensor.name)
        };
        let Some(open) = &mut self.open else {
            return Err(defect("a bucket came before the export began"));
        };
        let Some(number) = open.pending.shift_remove(tensor.name) else {
            return Err(defect("the tensor was not announced, or came twice"));
        };
        if tensor.scale.is_some() || !tensor.is_full() {
            return Err(defect("wanted a full tensor without a scale"));
        }
        let shard = &mut open.shards[number];
        let count: usize = tensor.shape.iter().product();
        let announced = shard.tensors.iter().find(|t| t.name == tensor.name);
        if announced.is_none_or(|t| t.shape != tensor.shape) || tensor.data.len() != count {
            return Err(defect(
                "the tensor does not have the shape that was announced",
            ));
        }
        if self.options.finite && !tensor.data.all_finite() {
            return Err(not_finite("export_weights", tensor.name));
        }
        let writer = match &mut shard.writer {
            Some(writer) => writer,
            closed => {
                let tensors: Vec<_> = (shard.tensors.iter())
                    .map(|t| (t.name.as_str(), dtype, t.shape.as_slice()))
                    .collect();
                let path = open.folder.path().join(&shard.file);
                closed.insert(TensorFileWriter::create(&path, &tensors)?)
            }
        };
        // Bounds the converted copy.
        const CHUNK: usize = 1 << 20;
        let mut bytes = Vec::new();
        for start in (0..count).step_by(CHUNK) {
            bytes.clear();
            let range = start..count.min(start + CHUNK);
            match encode(&tensor.data, range, dtype, &mut bytes) {
                Some(true) => writer.write_at(tensor.name, start * dtype.size(), &bytes)?,
                Some(false) => {
                    return Err(overflow(tensor.name, dtype));
                }
                None => return Err(defect("wanted float values in host memory")),
            }
        }
        shard.num_pending -= 1;
        if shard.num_pending == 0
            && let Some(writer) = shard.writer.take()
        {
            writer.finish()?;
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        let open = self.open.take().ok_or_else(|| {
            let message = "the export was committed before it began";
            Error::new(ErrorKind::Defect, "export_weights", message)
        })?;
        if !open.pending.is_empty() {
            let missing: Vec<_> = open.pending.keys().map(String::as_str).collect();
            let message = "the export was committed before all tensors came";
            return Err(Error::new(ErrorKind::Defect, "export_weights", message)
                .with("missing", missing.join(", ")));
        }
        if open.shards.len() > 1 {
            open.folder.write(INDEX_FILE, &self.index(&open.shards))?;
        }
        let config = Value::Object(self.true_config());
        open.folder
            .write("config.json", format!("{config:#}\n").as_bytes())?;
        if let Some(from) = &self.options.source_folder {
            for name in COMPANIONS {
                let path = from.join(name);
                if path.is_file() {
                    open.folder.copy(&path, name)?;
                }
            }
        }
        // Something may have been put there since the start.
        check_replaceable(&self.target)?;
        open.folder.commit()
    }

    fn index(&self, shards: &[Shard]) -> Vec<u8> {
        let mut map: Vec<(&str, &str)> = (shards.iter())
            .flat_map(|s| s.tensors.iter().map(|t| (t.name.as_str(), s.file.as_str())))
            .collect();
        map.sort_unstable();
        let map: Map<_, _> = map
            .into_iter()
            .map(|(t, f)| (t.to_owned(), json!(f)))
            .collect();
        let total = self.model.num_parameters() * self.dtype().size();
        let index = json!({"metadata": {"total_size": total}, "weight_map": map});
        format!("{index:#}\n").into_bytes()
    }

    /// The config as read, but for the dtype, which says what the files hold.
    fn true_config(&self) -> Map<String, Value> {
        let mut config = self.model.config.clone();
        let dtype = json!(match self.dtype() {
            DType::F64 => "float64",
            DType::Bf16 => "bfloat16",
            DType::F16 => "float16",
            _ => "float32",
        });
        let old = config
            .get_mut("torch_dtype")
            .map(|value| *value = dtype.clone());
        if old.is_none() || config.contains_key("dtype") {
            config.insert("dtype".to_owned(), dtype);
        }
        config
    }
}

impl WeightSink for HfWriter {
    fn begin(&mut self, manifest: &WeightManifest) -> Result<()> {
        self.open = None;
        self.start(manifest)
    }

    fn bucket(&mut self, tensors: &[TensorSlice<'_>]) -> Result<()> {
        let result = tensors.iter().try_for_each(|tensor| self.receive(tensor));
        if result.is_err() {
            // Leaves nothing half-written, whether or not the caller aborts.
            self.open = None;
        }
        result
    }

    fn commit(&mut self) -> Result<()> {
        self.finish()
    }

    fn abort(&mut self) {
        self.open = None;
    }
}

/// The target may be absent, or hold only what an export writes: nothing of the user's own is ever removed.
fn check_replaceable(target: &Path) -> Result<()> {
    let refuse = |message: &str| {
        Error::new(ErrorKind::File, "export_weights", message)
            .with("file", target.display())
            .help("choose another place, or remove what is there")
    };
    if !target.exists() {
        return Ok(());
    }
    let entries = fs::read_dir(target).map_err(|e| {
        refuse("the place of the export is not a folder that can be read").caused_by(e)
    })?;
    for entry in entries {
        let entry = entry.map_err(|e| refuse("cannot read the folder").caused_by(e))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let weights = name.starts_with("model") && name.ends_with(".safetensors");
        let ours = weights
            || name == "config.json"
            || name == INDEX_FILE
            || COMPANIONS.contains(&name.as_str());
        if !ours || entry.path().is_dir() {
            return Err(
                refuse("the folder holds what an export does not write").with("found", name)
            );
        }
    }
    Ok(())
}

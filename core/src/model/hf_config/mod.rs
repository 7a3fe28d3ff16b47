//! Reads a Hugging Face `config.json`.
//!
//! A key that is absent takes the default that `transformers` 5 gives it for the family. What we cannot compute
//! is refused by name; keys that do not change the computation are kept and ignored.

mod attention;
mod family;
mod keys;
mod mlp;
mod rope;
#[cfg(test)]
mod tests;

use std::path::Path;

use serde_json::{Map, Value};

use self::{family::Defaults, keys::Keys};
use super::{Family, ModelSpec};
use crate::{DType, Error, ErrorKind, Result, files::read_text};

/// Larger configs are hostile: real ones take a few KB.
const MAX_CONFIG_BYTES: u64 = 16 << 20;
/// Most elements a model may have; keeps every size computed from a config far from overflow.
const MAX_PARAMETERS: u128 = 1 << 46;

impl ModelSpec {
    /// Reads `config.json` of a Hugging Face folder.
    ///
    /// # Errors
    /// `File` if it cannot be read or is inconsistent, `Unsupported` for a family or feature we do not compute;
    /// each names the file and, where it has one, the key.
    pub fn from_folder(folder: &Path) -> Result<Self> {
        let path = folder.join("config.json");
        let fail = |message: &str| {
            Error::new(ErrorKind::File, "read_model_config", message)
                .with("file", path.display())
                .help("give a folder that holds config.json and *.safetensors, as save_pretrained writes it")
        };
        if !folder.is_dir() {
            return Err(fail("the model folder does not exist or is not a folder"));
        }
        let json = read_text(&path, MAX_CONFIG_BYTES)
            .map_err(|e| fail("cannot read the model's config").caused_by(e))?;
        Self::from_hf_config(&json, &path)
    }

    /// Reads the text of a `config.json`; `path` is for messages.
    ///
    /// # Errors
    /// As [`Self::from_folder`].
    pub fn from_hf_config(json: &str, path: &Path) -> Result<Self> {
        let config: Map<String, Value> = serde_json::from_str(json).map_err(|e| {
            Error::new(ErrorKind::File, "read_model_config", "not a JSON object")
                .with("file", path.display())
                .with("line", e.line())
                .caused_by(e)
        })?;
        let keys = Keys::new(&config, path);
        let family = family::family(&keys)?;
        let defaults = Defaults::of(family);
        refuse_unsupported(&keys, family)?;

        let num_layers = keys
            .optional_size("num_hidden_layers", 0, 1 << 13)?
            .unwrap_or(defaults.num_layers);
        let attention = attention::read(&keys, family, &defaults, num_layers)?;
        let mlp = mlp::read(&keys, family, &defaults, num_layers)?;
        let max_position_embeddings =
            keys.size("max_position_embeddings", defaults.max_positions, 1 << 31)?;
        let layers = (attention.windows.into_iter().zip(mlp.layers))
            .map(|(sliding_window, mlp)| super::LayerSpec {
                sliding_window,
                mlp,
            })
            .collect();
        let spec = Self {
            family,
            vocab_size: keys.size("vocab_size", defaults.vocab_size, 1 << 26)?,
            hidden_size: attention.hidden_size,
            num_heads: attention.num_heads,
            num_kv_heads: attention.num_kv_heads,
            head_dim: attention.head_dim,
            rms_norm_eps: keys.positive("rms_norm_eps", Some(defaults.rms_norm_eps))?,
            rope: rope::read(&keys, defaults.rope_theta, max_position_embeddings)?,
            max_position_embeddings,
            tied_embeddings: keys.flag("tie_word_embeddings", false)?,
            qkv_bias: family == Family::Qwen2,
            qk_norm: matches!(family, Family::Qwen3 | Family::Qwen3Moe),
            layers,
            moe: mlp.moe,
            dtype: dtype(&keys)?,
            config: config.clone(),
        };
        check_total(&spec, &keys)?;
        Ok(spec)
    }
}

/// Features that `transformers` would honour and we do not compute.
fn refuse_unsupported(keys: &Keys<'_>, family: Family) -> Result<()> {
    if let Some(act) = keys.text("hidden_act")? {
        // The two names of x * sigmoid(x).
        if !matches!(act, "silu" | "swish") {
            return Err(keys.unsupported("hidden_act", act, "silu"));
        }
    }
    let mut off = vec!["attention_bias"];
    if family == Family::Llama {
        off.push("mlp_bias");
    }
    for key in off {
        if keys.flag(key, false)? {
            return Err(keys.unsupported(key, true, "false"));
        }
    }
    for key in ["attention_dropout", "router_jitter_noise"] {
        if let Some(value) = keys.number(key)?.filter(|&v| v != 0.0) {
            return Err(keys.unsupported(key, value, "0"));
        }
    }
    if let Some(value) = keys.number("partial_rotary_factor")?.filter(|&v| v != 1.0) {
        return Err(keys.unsupported(
            "partial_rotary_factor",
            value,
            "1 (RoPE over the whole head)",
        ));
    }
    for (key, supported) in [
        (
            "quantization_config",
            "weights stored as f32, bf16, f16 or f64",
        ),
        (
            "compression_config",
            "weights stored as f32, bf16, f16 or f64",
        ),
        ("auto_map", "models whose code is transformers' own"),
    ] {
        if let Some(value) = keys.value(key) {
            return Err(keys.unsupported(key, value, supported));
        }
    }
    Ok(())
}

fn dtype(keys: &Keys<'_>) -> Result<DType> {
    let (key, text) = match (keys.text("dtype")?, keys.text("torch_dtype")?) {
        (Some(new), Some(old)) if new != old => {
            return Err(keys.invalid("dtype", new, &format!("{old}, as torch_dtype says")));
        }
        (Some(text), _) => ("dtype", text),
        (None, Some(text)) => ("torch_dtype", text),
        (None, None) => return Ok(DType::F32),
    };
    match text.strip_prefix("torch.").unwrap_or(text) {
        "float32" | "float" => Ok(DType::F32),
        "bfloat16" => Ok(DType::Bf16),
        "float16" | "half" => Ok(DType::F16),
        "float64" | "double" => Ok(DType::F64),
        _ => Err(keys.unsupported(key, text, "float32, bfloat16, float16 or float64")),
    }
}

/// Refuses a model so large that sizes computed from it would overflow or exhaust memory.
fn check_total(spec: &ModelSpec, keys: &Keys<'_>) -> Result<()> {
    let [v, d, h, k, e] = [
        spec.vocab_size,
        spec.hidden_size,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
    ]
    .map(|n| n as u128);
    let mut total = 2 * v * d;
    for layer in &spec.layers {
        total += 2 * d * (h + k) * e;
        total += match (layer.mlp, spec.moe) {
            (super::MlpSpec::Dense { ffn_size }, _) => 3 * d * ffn_size as u128,
            (super::MlpSpec::Moe, Some(moe)) => {
                moe.num_experts as u128 * (3 * moe.ffn_size as u128 + 1) * d
            }
            (super::MlpSpec::Moe, None) => 0,
        };
    }
    if total > MAX_PARAMETERS {
        return Err(keys.invalid(
            "hidden_size",
            format!("sizes that make {total} parameters"),
            &format!("at most {MAX_PARAMETERS}"),
        ));
    }
    Ok(())
}

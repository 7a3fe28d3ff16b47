//! The families and what `transformers` takes where a config is silent.

use super::keys::Keys;
use crate::{Result, model::Family};

/// (family, `model_type`, architecture)
const FAMILIES: [(Family, &str, &str); 6] = [
    (Family::Llama, "llama", "LlamaForCausalLM"),
    (Family::Mistral, "mistral", "MistralForCausalLM"),
    (Family::Qwen2, "qwen2", "Qwen2ForCausalLM"),
    (Family::Qwen3, "qwen3", "Qwen3ForCausalLM"),
    (Family::Mixtral, "mixtral", "MixtralForCausalLM"),
    (Family::Qwen3Moe, "qwen3_moe", "Qwen3MoeForCausalLM"),
];

/// The family that `model_type` and `architectures` name.
pub(super) fn family(keys: &Keys<'_>) -> Result<Family> {
    let supported = FAMILIES.map(|(_, name, _)| name).join(", ");
    let Some(model_type) = keys.text("model_type")? else {
        return Err(keys.invalid("model_type", "nothing", &format!("one of {supported}")));
    };
    let Some((family, _, architecture)) = FAMILIES.iter().find(|(_, name, _)| *name == model_type)
    else {
        return Err(keys.unsupported("model_type", model_type, &supported));
    };
    if let Some(list) = keys.list("architectures")?
        && !list.is_empty()
        && !list.iter().any(|a| a.as_str() == Some(architecture))
    {
        let found = serde_json::Value::from(list.clone());
        return Err(keys.unsupported("architectures", found, architecture));
    }
    Ok(*family)
}

/// Values of absent keys.
pub(super) struct Defaults {
    pub(super) vocab_size: usize,
    pub(super) hidden_size: usize,
    pub(super) ffn_size: usize,
    pub(super) num_layers: usize,
    pub(super) num_heads: usize,
    /// `None`: as many as query heads.
    pub(super) num_kv_heads: Option<usize>,
    /// `None`: hidden size over query heads.
    pub(super) head_dim: Option<usize>,
    pub(super) max_positions: usize,
    pub(super) rms_norm_eps: f64,
    pub(super) rope_theta: f64,
    pub(super) sliding_window: Option<usize>,
}

impl Defaults {
    pub(super) fn of(family: Family) -> Self {
        let llama = Self {
            vocab_size: 32_000,
            hidden_size: 4096,
            ffn_size: 11_008,
            num_layers: 32,
            num_heads: 32,
            num_kv_heads: None,
            head_dim: None,
            max_positions: 2048,
            rms_norm_eps: 1e-6,
            rope_theta: 10_000.0,
            sliding_window: None,
        };
        let qwen2 = Self {
            vocab_size: 151_936,
            ffn_size: 22_016,
            num_kv_heads: Some(32),
            max_positions: 32_768,
            sliding_window: Some(4096),
            ..llama
        };
        match family {
            Family::Llama => llama,
            Family::Mistral => Self {
                ffn_size: 14_336,
                num_kv_heads: Some(8),
                max_positions: 131_072,
                sliding_window: Some(4096),
                ..llama
            },
            Family::Mixtral => Self {
                ffn_size: 14_336,
                num_kv_heads: Some(8),
                max_positions: 131_072,
                rms_norm_eps: 1e-5,
                rope_theta: 1_000_000.0,
                ..llama
            },
            Family::Qwen2 => qwen2,
            Family::Qwen3 => Self {
                head_dim: Some(128),
                ..qwen2
            },
            Family::Qwen3Moe => Self {
                hidden_size: 2048,
                ffn_size: 6144,
                num_layers: 24,
                num_kv_heads: Some(4),
                ..qwen2
            },
        }
    }
}

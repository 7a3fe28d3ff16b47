//! The model as data: what a Hugging Face `config.json` says, and every parameter with its name and shape.

mod hf_config;
mod parameter;
mod resolve;
mod rope;

pub use parameter::{ParameterKind, ParameterSpec};
pub use resolve::{LocalModels, ModelResolver};
pub use rope::{RopeScaling, RopeSpec};

use serde::{Deserialize, Serialize};

use crate::Diagnostic;

/// The model families that are read and written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Family {
    /// Llama 1 to 3 and its kin (SmolLM2 among them).
    Llama,
    /// Mistral: Llama with a sliding window.
    Mistral,
    /// Qwen2 and 2.5: bias on q, k and v.
    Qwen2,
    /// Qwen3: norms on q and k.
    Qwen3,
    /// Mixtral: Mistral with experts.
    Mixtral,
    /// Qwen3 with experts.
    Qwen3Moe,
}

/// A decoder-only transformer with RMSNorm, RoPE, grouped-query attention and SwiGLU.
///
/// Per layer: `x += o_proj(attention(rope(q), rope(k), v))` over `input_layernorm(x)`, then
/// `x += mlp(post_attention_layernorm(x))`; at the end `norm` and the head.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelSpec {
    /// The family, which decides the parameters' names.
    pub family: Family,
    /// V.
    pub vocab_size: usize,
    /// D.
    pub hidden_size: usize,
    /// H, query heads.
    pub num_heads: usize,
    /// K, key/value heads; divides H.
    pub num_kv_heads: usize,
    /// E; not always D / H.
    pub head_dim: usize,
    /// Epsilon of every RMSNorm.
    pub rms_norm_eps: f64,
    /// Rotary position embedding.
    pub rope: RopeSpec,
    /// Longest sequence the model was made for, in tokens.
    pub max_position_embeddings: usize,
    /// Whether the head is the embedding.
    pub tied_embeddings: bool,
    /// Whether q, k and v have a bias.
    pub qkv_bias: bool,
    /// Whether q and k are normalised per head before RoPE.
    pub qk_norm: bool,
    /// The layers in order.
    pub layers: Vec<LayerSpec>,
    /// Experts, where any layer has them.
    pub moe: Option<MoeSpec>,
    /// Element type the weights are stored in (`dtype` or `torch_dtype` of the config; f32 if unsaid).
    pub dtype: crate::DType,
    /// The config as read, which an export writes back with its dtype made true.
    pub config: serde_json::Map<String, serde_json::Value>,
}

/// What one layer has of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerSpec {
    /// A query at position i sees keys at j with `i - j < window`; `None` sees all before it.
    pub sliding_window: Option<usize>,
    /// The feed-forward part.
    pub mlp: MlpSpec,
}

/// A layer's feed-forward part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum MlpSpec {
    /// One SwiGLU of this width F.
    Dense {
        /// F.
        ffn_size: usize,
    },
    /// A router and experts, as [`MoeSpec`] says.
    Moe,
}

/// Mixture of experts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct MoeSpec {
    /// X.
    pub num_experts: usize,
    /// Experts a token goes to.
    pub experts_per_token: usize,
    /// F of one expert.
    pub ffn_size: usize,
    /// Whether the chosen experts' softmax weights are renormalised to sum to 1.
    pub norm_topk_prob: bool,
    /// Weight of the load-balancing loss that the model's config asks for: `router_aux_loss_coef` where it sets
    /// `output_router_logits` (as in `transformers`, the flag asks for the loss), else 0.
    pub aux_loss_coefficient: f64,
}

/// Rules of what a model must be for any engine: id and what is wrong. A file that breaks one is not read.
pub(crate) const MODEL_RULES: [(&str, &str); 4] = [
    ("MODEL-03", "a head dim that RoPE cannot turn in pairs"),
    (
        "MODEL-04",
        "query heads that do not share the key/value heads evenly",
    ),
    ("MODEL-05", "a sliding window of 0"),
    ("MODEL-06", "experts that tokens cannot be sent to"),
];

impl ModelSpec {
    /// Every fault of a model that was built in code.
    pub fn check(&self) -> Vec<Diagnostic> {
        let (heads, kv, dim) = (self.num_heads, self.num_kv_heads, self.head_dim);
        let fault = |(rule, _): (&'static str, &str), found: String, remedy: &str| {
            Diagnostic::error(rule, "model", found, remedy)
        };
        let [head_dim, shared_heads, window, experts] = MODEL_RULES;
        let mut faults = Vec::new();
        if dim == 0 || !dim.is_multiple_of(2) {
            faults.push(fault(
                head_dim,
                format!("the head dim is {dim}"),
                "make it even and above 0",
            ));
        }
        if heads == 0 || kv == 0 || !heads.is_multiple_of(kv) {
            faults.push(fault(
                shared_heads,
                format!("{heads} query heads over {kv} key/value heads"),
                "num_key_value_heads must divide num_attention_heads",
            ));
        }
        if self.layers.iter().any(|l| l.sliding_window == Some(0)) {
            faults.push(fault(
                window,
                "a layer's sliding window is 0, so that a token would not see itself".to_owned(),
                "sliding_window must be at least 1, or null",
            ));
        }
        let sparse = self.layers.iter().any(|l| l.mlp == MlpSpec::Moe);
        match self.moe {
            None if sparse => faults.push(fault(
                experts,
                "a layer has experts, and the model does not say which".to_owned(),
                "give the model's moe",
            )),
            Some(moe) if !(1..=moe.num_experts).contains(&moe.experts_per_token) => {
                faults.push(fault(
                    experts,
                    format!(
                        "a token goes to {} of {} experts",
                        moe.experts_per_token, moe.num_experts
                    ),
                    "num_experts_per_tok must be from 1 to the number of experts",
                ));
            }
            _ => {}
        }
        faults
    }

    /// Number of layers.
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// Name of the head's weight: the embedding's where they are tied.
    pub fn head_name(&self) -> &'static str {
        if self.tied_embeddings {
            "model.embed_tokens.weight"
        } else {
            "lm_head.weight"
        }
    }

    /// Number of elements over all parameters (a tied head counts once).
    pub fn num_parameters(&self) -> usize {
        self.parameters()
            .iter()
            .map(ParameterSpec::num_elements)
            .sum()
    }

    /// FLOPs of forward and backward over sequences of these lengths: 6 per matrix parameter and token (the
    /// embedding look-up is none, a tied head is one, and of the experts only those a token visits), and for
    /// attention's two products `12 x H x E x` (visible query-key pairs) a layer.
    pub fn train_flops(&self, lengths: &[usize]) -> f64 {
        let tokens: usize = lengths.iter().sum();
        let (d, he, ke) = (
            self.hidden_size,
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
        );
        let mut per_token = (self.vocab_size * d) as f64;
        let mut attention = 0.0;
        for layer in &self.layers {
            per_token += (2 * d * he + 2 * d * ke) as f64;
            per_token += match (layer.mlp, &self.moe) {
                (MlpSpec::Moe, Some(moe)) => {
                    (moe.experts_per_token * 3 * d * moe.ffn_size + d * moe.num_experts) as f64
                }
                (MlpSpec::Dense { ffn_size }, _) => (3 * d * ffn_size) as f64,
                (MlpSpec::Moe, None) => 0.0,
            };
            let pairs: f64 = lengths
                .iter()
                .map(|&n| {
                    let full = layer.sliding_window.map_or(n, |w| n.min(w));
                    (full * (full + 1) / 2 + (n - full) * full) as f64
                })
                .sum();
            attention += 12.0 * he as f64 * pairs;
        }
        6.0 * per_token * tokens as f64 + attention
    }
}

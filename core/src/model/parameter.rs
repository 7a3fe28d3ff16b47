//! Every parameter of a model: canonical (Hugging Face) name, shape, and what it does.

use serde::{Deserialize, Serialize};

use super::{Family, MlpSpec, ModelSpec};
use crate::DType;

/// What a parameter does, which decides how axes split it and how it starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ParameterKind {
    /// Token embedding `[V, D]`.
    Embedding,
    /// Output head `[V, D]`.
    Head,
    /// RMSNorm weight over the model dim, `[D]`.
    Norm,
    /// RMSNorm weight over a head, `[E]`.
    HeadNorm,
    /// Linear weight `[out, in]` split by output (q, gate, up).
    ColumnLinear,
    /// Bias `[out]` of a column linear.
    ColumnBias,
    /// Linear weight `[out, in]` split by key/value head (k, v), replicated where heads are fewer than ranks.
    KeyValueLinear,
    /// Bias `[out]` of a key/value linear.
    KeyValueBias,
    /// Linear weight `[out, in]` split by input (o, down).
    RowLinear,
    /// Router weight `[X, D]`.
    Router,
}

/// One parameter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ParameterSpec {
    /// Name in a Hugging Face checkpoint.
    pub name: String,
    /// Shape, as stored there.
    pub shape: Vec<usize>,
    /// What it does.
    pub kind: ParameterKind,
    /// The layer it belongs to; `None` for embedding, final norm and head.
    pub layer: Option<usize>,
    /// The expert it belongs to.
    pub expert: Option<usize>,
    /// Element type it is stored in when exported.
    pub dtype: DType,
}

impl ParameterSpec {
    /// Number of elements.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }
}

impl ModelSpec {
    /// Every parameter, in the order of the forward pass.
    pub fn parameters(&self) -> Vec<ParameterSpec> {
        let d = self.hidden_size;
        let mut list = List {
            model: self,
            parameters: Vec::new(),
        };
        list.add(
            "model.embed_tokens.weight",
            &[self.vocab_size, d],
            ParameterKind::Embedding,
        );
        for layer in 0..self.num_layers() {
            list.layer(layer);
        }
        list.add("model.norm.weight", &[d], ParameterKind::Norm);
        if !self.tied_embeddings {
            list.add("lm_head.weight", &[self.vocab_size, d], ParameterKind::Head);
        }
        list.parameters
    }
}

struct List<'a> {
    model: &'a ModelSpec,
    parameters: Vec<ParameterSpec>,
}

impl List<'_> {
    fn add(&mut self, name: &str, shape: &[usize], kind: ParameterKind) {
        self.push(name.to_owned(), shape, kind, None, None);
    }

    fn push(
        &mut self,
        name: String,
        shape: &[usize],
        kind: ParameterKind,
        layer: Option<usize>,
        expert: Option<usize>,
    ) {
        self.parameters.push(ParameterSpec {
            name,
            shape: shape.to_vec(),
            kind,
            layer,
            expert,
            dtype: self.model.dtype,
        });
    }

    fn layer(&mut self, index: usize) {
        use ParameterKind::{
            ColumnBias, ColumnLinear, HeadNorm, KeyValueBias, KeyValueLinear, Norm, RowLinear,
        };
        let model = self.model;
        let (d, e) = (model.hidden_size, model.head_dim);
        let (he, ke) = (model.num_heads * e, model.num_kv_heads * e);
        let mut add = |name: &str, shape: &[usize], kind| {
            self.push(
                format!("model.layers.{index}.{name}"),
                shape,
                kind,
                Some(index),
                None,
            );
        };
        add("input_layernorm.weight", &[d], Norm);
        for (name, rows, weight, bias) in [
            ("q", he, ColumnLinear, ColumnBias),
            ("k", ke, KeyValueLinear, KeyValueBias),
            ("v", ke, KeyValueLinear, KeyValueBias),
        ] {
            add(&format!("self_attn.{name}_proj.weight"), &[rows, d], weight);
            if model.qkv_bias {
                add(&format!("self_attn.{name}_proj.bias"), &[rows], bias);
            }
        }
        if model.qk_norm {
            add("self_attn.q_norm.weight", &[e], HeadNorm);
            add("self_attn.k_norm.weight", &[e], HeadNorm);
        }
        add("self_attn.o_proj.weight", &[d, he], RowLinear);
        add("post_attention_layernorm.weight", &[d], Norm);
        match (model.layers[index].mlp, model.moe) {
            (MlpSpec::Dense { ffn_size }, _) => {
                add("mlp.gate_proj.weight", &[ffn_size, d], ColumnLinear);
                add("mlp.up_proj.weight", &[ffn_size, d], ColumnLinear);
                add("mlp.down_proj.weight", &[d, ffn_size], RowLinear);
            }
            (MlpSpec::Moe, Some(moe)) => {
                let prefix = match model.family {
                    Family::Mixtral => "block_sparse_moe",
                    _ => "mlp",
                };
                add(
                    &format!("{prefix}.gate.weight"),
                    &[moe.num_experts, d],
                    ParameterKind::Router,
                );
                for expert in 0..moe.num_experts {
                    self.expert(index, expert, prefix, moe.ffn_size);
                }
            }
            (MlpSpec::Moe, None) => {}
        }
    }

    fn expert(&mut self, layer: usize, expert: usize, prefix: &str, ffn: usize) {
        let names = match self.model.family {
            Family::Mixtral => ["w1", "w3", "w2"],
            _ => ["gate_proj", "up_proj", "down_proj"],
        };
        let d = self.model.hidden_size;
        for (name, shape, kind) in [
            (names[0], [ffn, d], ParameterKind::ColumnLinear),
            (names[1], [ffn, d], ParameterKind::ColumnLinear),
            (names[2], [d, ffn], ParameterKind::RowLinear),
        ] {
            let name = format!("model.layers.{layer}.{prefix}.experts.{expert}.{name}.weight");
            self.push(name, &shape, kind, Some(layer), Some(expert));
        }
    }
}

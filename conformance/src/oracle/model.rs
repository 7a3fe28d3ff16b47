//! The forward pass, written as the model's description reads: one sequence after the other, one head after
//! the other, one expert after the other.
//!
//! Shapes: T packed tokens, D model, H query heads, K key/value heads, E head dim, F feed-forward, V
//! vocabulary, X experts.

use std::{ops::Range, sync::Arc};

use drivetrain_core::{
    batch::Batch,
    model::{Family, LayerSpec, MlpSpec, ModelSpec, MoeSpec},
    moe::ExpertBias,
};
use indexmap::IndexMap;

use super::{
    defect::Defect,
    matrix::Matrix,
    router::{Routed, Scores, top_k},
    tape::{Tape, Var},
};

/// Weights by Hugging Face name.
pub(super) type Parameters = IndexMap<String, Arc<Matrix>>;

/// What is trained: weights, and the selection bias of experts.
#[derive(Debug, Clone)]
pub(super) struct Policy {
    pub(super) weights: Parameters,
    pub(super) bias: ExpertBias,
}

/// A forward pass over a batch, up to the final norm.
pub(super) struct Pass<'a> {
    spec: &'a ModelSpec,
    bias: &'a ExpertBias,
    defect: Option<Defect>,
    sequences: Vec<Range<usize>>,
    positions: Vec<u32>,
    /// The weights on the tape.
    pub(super) parameters: IndexMap<String, Var>,
    pub(super) tape: Tape,
    /// Layers with experts, in order.
    pub(super) routed: Vec<Routed>,
}

impl<'a> Pass<'a> {
    pub(super) fn new(
        spec: &'a ModelSpec,
        policy: &'a Policy,
        batch: &Batch,
        defect: Option<Defect>,
    ) -> Self {
        let mut tape = Tape::default();
        let parameters = (policy.weights)
            .iter()
            .map(|(name, value)| (name.clone(), tape.leaf(value.clone())))
            .collect();
        let mut sequences: Vec<_> = (0..batch.num_sequences())
            .map(|s| batch.sequence(s))
            .collect();
        if defect == Some(Defect::AttentionCrossesSequences) {
            sequences = std::iter::once(0..batch.num_tokens()).collect();
        }
        let mut positions = batch.positions();
        if defect == Some(Defect::PositionsWrapAround) {
            let first = batch.lengths().first().map_or(1, |&n| n.max(1));
            positions = (0..batch.num_tokens())
                .map(|t| (t % first) as u32)
                .collect();
        }
        Self {
            spec,
            bias: &policy.bias,
            defect,
            sequences,
            positions,
            parameters,
            tape,
            routed: Vec::new(),
        }
    }

    /// Log-probs over the vocabulary after each of these tokens, `[n, V]`.
    pub(super) fn log_probs_after(
        &mut self,
        tokens: &[u32],
        rows: Vec<usize>,
        temperature: f64,
    ) -> Var {
        let embedding = self.parameters["model.embed_tokens.weight"];
        let ids = tokens.iter().map(|&t| t as usize).collect();
        let mut x = self.tape.gather_rows(embedding, ids); // [T, D]
        self.routed.clear();
        for index in 0..self.spec.num_layers() {
            x = self.layer(index, x);
        }
        let x = self.norm(x, "model.norm.weight");
        let x = self.tape.gather_rows(x, rows); // [n, D]
        let logits = self.tape.linear(x, self.parameters[self.spec.head_name()]); // [n, V]
        let logits = self.tape.scale(logits, 1.0 / temperature);
        self.tape.log_softmax(logits)
    }

    fn layer(&mut self, index: usize, x: Var) -> Var {
        let layer = self.spec.layers[index];
        let prefix = format!("model.layers.{index}.");
        let x = self.tape.keep(x);
        let normed = self.norm(x, &format!("{prefix}input_layernorm.weight"));
        let normed = self.tape.keep(normed);
        let attended = self.attention(&format!("{prefix}self_attn."), layer, normed);
        let x = self.tape.add(x, attended);
        let x = self.tape.keep(x);
        let normed = self.norm(x, &format!("{prefix}post_attention_layernorm.weight"));
        let normed = self.tape.keep(normed);
        let fed = match (layer.mlp, self.spec.moe) {
            (MlpSpec::Moe, Some(moe)) => self.experts(index, &moe, normed),
            _ => {
                let names = ["gate_proj", "up_proj", "down_proj"];
                self.swiglu(&format!("{prefix}mlp."), names, normed)
            }
        };
        self.tape.add(x, fed)
    }

    fn norm(&mut self, x: Var, name: &str) -> Var {
        let weight = self.parameters[name];
        self.tape.rms_norm(x, weight, self.spec.rms_norm_eps)
    }

    fn attention(&mut self, prefix: &str, layer: LayerSpec, x: Var) -> Var {
        let q = self.projected(prefix, "q", x); // [T, H E]
        let k = self.projected(prefix, "k", x); // [T, K E]
        let v = self.projected(prefix, "v", x);
        let (q, k) = if self.spec.qk_norm {
            let (q, k) = (self.tape.keep(q), self.tape.keep(k));
            let q = self.norm(q, &format!("{prefix}q_norm.weight"));
            (q, self.norm(k, &format!("{prefix}k_norm.weight")))
        } else {
            (q, k)
        };
        let (q, k) = (self.rope(q), self.rope(k));
        let mut parts = Vec::new();
        for sequence in self.sequences.clone() {
            let attended = self.attend(q, k, v, &sequence, layer.sliding_window);
            parts.push((sequence.start, 0, attended));
        }
        let width = self.spec.num_heads * self.spec.head_dim;
        let y = self.tape.stitch(self.positions.len(), width, parts);
        let y = self.tape.keep(y);
        let o = self.parameters[&format!("{prefix}o_proj.weight")];
        self.tape.linear(y, o)
    }

    fn projected(&mut self, prefix: &str, which: &str, x: Var) -> Var {
        let weight = self.parameters[&format!("{prefix}{which}_proj.weight")];
        let y = self.tape.linear(x, weight);
        if !self.spec.qkv_bias {
            return y;
        }
        let bias = self.parameters[&format!("{prefix}{which}_proj.bias")];
        self.tape.add_bias(y, bias)
    }

    fn rope(&mut self, x: Var) -> Var {
        let rope = &self.spec.rope;
        let frequencies = rope.inverse_frequencies(self.spec.head_dim);
        let half = frequencies.len();
        let table = |f: fn(f64) -> f64| {
            let angles = self.positions.iter().flat_map(|&p| {
                let angle = move |w: &f32| f64::from(p) * f64::from(*w);
                frequencies.iter().map(angle)
            });
            let data = angles.map(|a| f(a) * rope.attention_factor()).collect();
            Matrix::new(self.positions.len(), half, data)
        };
        let (cos, sin) = (table(f64::cos), table(f64::sin));
        self.tape.rotate(x, self.spec.head_dim, cos, sin)
    }

    /// Attention within one sequence, `[n, H E]`.
    fn attend(
        &mut self,
        q: Var,
        k: Var,
        v: Var,
        sequence: &Range<usize>,
        window: Option<usize>,
    ) -> Var {
        let (heads, kv_heads, e) = (
            self.spec.num_heads,
            self.spec.num_kv_heads,
            self.spec.head_dim,
        );
        let n = sequence.len();
        let widest = |v: usize| {
            if self.is(Defect::WindowOffByOne) {
                v + 1
            } else {
                v
            }
        };
        let window = window.map_or(usize::MAX, widest);
        let tape = &mut self.tape;
        let q = tape.slice(q, sequence.clone(), 0..heads * e);
        let k = tape.slice(k, sequence.clone(), 0..kv_heads * e);
        let v = tape.slice(v, sequence.clone(), 0..kv_heads * e);
        let mut parts = Vec::new();
        for head in 0..heads {
            let mut kv_head = head / (heads / kv_heads);
            if self.defect == Some(Defect::HeadsInterleaved) {
                kv_head = head % kv_heads;
            }
            let of = |index: usize| index * e..(index + 1) * e;
            let tape = &mut self.tape;
            let q = tape.slice(q, 0..n, of(head)); // [n, E]
            let k = tape.slice(k, 0..n, of(kv_head));
            let v = tape.slice(v, 0..n, of(kv_head));
            let [q, k, v] = [q, k, v].map(|x| tape.keep(x));
            let scores = tape.linear(q, k); // [n, n]
            let scores = tape.scale(scores, 1.0 / (e as f64).sqrt());
            let probs = tape.softmax_where(scores, |i, j| j <= i && i - j < window);
            parts.push((0, head * e, tape.matmul(probs, v)));
        }
        self.tape.stitch(n, heads * e, parts)
    }

    /// `down(silu(gate(x)) up(x))`.
    fn swiglu(&mut self, prefix: &str, names: [&str; 3], x: Var) -> Var {
        let weight = |name: &str| self.parameters[&format!("{prefix}{name}.weight")];
        let [mut gate, mut up, down] = names.map(weight);
        if self.is(Defect::GateAndUpSwapped) {
            std::mem::swap(&mut gate, &mut up);
        }
        let tape = &mut self.tape;
        let gate = tape.linear(x, gate); // [T, F]
        let up = tape.linear(x, up);
        let [gate, up] = [gate, up].map(|x| tape.keep(x));
        let gate = tape.silu(gate);
        let gate = tape.keep(gate);
        let product = tape.multiply(gate, up);
        let product = tape.keep(product);
        tape.linear(product, down)
    }

    /// Every token goes to the `k` experts of the largest router softmax (and selection bias, where there is one),
    /// whose outputs are added with these softmax values as weights (renormalised to sum to 1 where the model says so).
    fn experts(&mut self, layer: usize, moe: &MoeSpec, x: Var) -> Var {
        let prefix = format!("model.layers.{layer}.");
        let (block, names) = match self.spec.family {
            Family::Mixtral => ("block_sparse_moe", ["w1", "w3", "w2"]),
            _ => ("mlp", ["gate_proj", "up_proj", "down_proj"]),
        };
        let router = self.parameters[&format!("{prefix}{block}.gate.weight")];
        let logits = self.tape.linear(x, router); // [T, X]
        let probs = self.tape.softmax_where(logits, |_, _| true);
        let scores = self.scores(layer, self.tape.value(probs));
        let chosen = top_k(&scores, moe.experts_per_token); // [T, k]
        let compared = Scores {
            logits: self.tape.value(logits),
            probs: self.tape.value(probs),
            biased: self.bias.of(layer).is_some().then_some(&scores),
        };
        let margin = compared.margin(moe.experts_per_token);
        let mut weights = self.tape.pick(probs, chosen.clone());
        if self.is(Defect::BiasWeighsExperts) {
            let biased = self.tape.leaf(Arc::new(scores));
            weights = self.tape.pick(biased, chosen.clone());
        }
        if moe.norm_topk_prob && !self.is(Defect::RouterNotRenormalised) {
            weights = self.tape.normalise_rows(weights);
        }
        let (rows, cols) = (self.tape.value(x).rows, self.tape.value(x).cols);
        let mut sum = self.tape.leaf(Arc::new(Matrix::zeros(rows, cols)));
        self.routed.push(Routed {
            layer,
            logits,
            probs,
            chosen: chosen.clone(),
            margin,
        });
        for expert in 0..moe.num_experts {
            let visits: Vec<_> = (0..rows)
                .filter_map(|r| Some((r, chosen[r].iter().position(|&c| c == expert)?)))
                .collect();
            let (tokens, slots): (Vec<_>, Vec<_>) = visits.into_iter().unzip();
            let slots = slots.into_iter().map(|slot| vec![slot]).collect();
            let input = self.tape.gather_rows(x, tokens.clone());
            let input = self.tape.keep(input);
            let mut own = expert;
            if self.is(Defect::ExpertsRotated) {
                own = (expert + 1) % moe.num_experts;
            }
            let output = self.swiglu(&format!("{prefix}{block}.experts.{own}."), names, input);
            let output = self.tape.keep(output);
            let factors = self.tape.gather_rows(weights, tokens.clone());
            let factors = self.tape.pick(factors, slots); // [n, 1]
            let output = self.tape.scale_rows(output, factors);
            let output = self.tape.scatter_rows(output, tokens, rows);
            sum = self.tape.add(sum, output);
        }
        sum
    }

    /// What experts are chosen by.
    fn scores(&self, layer: usize, probs: &Matrix) -> Matrix {
        let mut scores = probs.clone();
        if let Some(bias) = self.bias.of(layer)
            && !self.is(Defect::BiasIgnored)
        {
            for r in 0..scores.rows {
                let row = scores.row_mut(r).iter_mut();
                row.zip(bias).for_each(|(p, b)| *p += b);
            }
        }
        scores
    }

    fn is(&self, defect: Defect) -> bool {
        self.defect == Some(defect)
    }
}

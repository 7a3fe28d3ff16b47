//! A mixture of experts: what every engine that has one does alike. Formulas and reasons: the handbook's
//! [chapter](crate::manual::experts).

use crate::{
    Error, ErrorKind, Result,
    batch::{Batch, BatchTotals},
    checkpoint::{StateReader, StateWriter},
    config::{JobConfig, LoadBalancing},
    model::{MlpSpec, ModelSpec},
};

/// Metric: the load-balancing loss without its coefficient, the experts per token where the load is even; a sum.
pub const LOAD_BALANCING_LOSS: &str = "load_balancing_loss";
/// Metric: the router's z-loss without its coefficient; a sum.
pub const ROUTER_Z_LOSS: &str = "router_z_loss";

/// Name of the blob that holds the selection bias.
const BIAS: &str = "expert_bias";

/// The router's losses of a job, its model's defaults filled in. They are added to the objective's loss where
/// gradients are made, and nowhere else.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouterLosses {
    /// The form of the load-balancing loss; `None` where its coefficient is 0.
    pub balancing: Option<LoadBalancing>,
    /// Its coefficient.
    pub balancing_coefficient: f64,
    /// The z-loss's; 0 is no such loss.
    pub z_coefficient: f64,
    /// Layers with experts, over which both are averaged.
    pub num_layers: usize,
    /// X.
    pub num_experts: usize,
}

impl RouterLosses {
    /// Those of a job; none for a model without experts.
    pub fn new(config: &JobConfig, model: &ModelSpec) -> Self {
        let own = model.moe.map_or(0.0, |m| m.aux_loss_coefficient);
        let given = config.moe.load_balancing_coefficient;
        let sparse = model.layers.iter().filter(|l| l.mlp == MlpSpec::Moe);
        let num_layers = sparse.count();
        let of = |coefficient| if num_layers > 0 { coefficient } else { 0.0 };
        let coefficient = of(given.unwrap_or(own));
        let form = config.moe.load_balancing.unwrap_or(LoadBalancing::Global);
        Self {
            balancing: (coefficient != 0.0).then_some(form),
            balancing_coefficient: coefficient,
            z_coefficient: of(config.moe.z_loss_coefficient),
            num_layers,
            num_experts: model.moe.map_or(0, |m| m.num_experts),
        }
    }

    /// What the load-balancing loss of one layer and one group is the sum of, over the group's tokens t and experts
    /// e: `slopes[e] * p[t, e]`, where p is the router's softmax. So it is the derivative by p.
    ///
    /// `num_sequences` and `num_tokens` are the group's counted sequences and tokens, `expert_tokens` how many of these
    /// each expert got, all over every rank that has a part of the group. Divided by the coefficient, the sum is what
    /// [`LOAD_BALANCING_LOSS`] counts.
    pub fn balancing_slopes(
        &self,
        totals: &BatchTotals,
        num_sequences: usize,
        num_tokens: usize,
        expert_tokens: &[u64],
    ) -> Vec<f64> {
        let share = self.share(totals) * num_sequences as f64;
        let factor = self.balancing_coefficient * share * self.num_experts as f64;
        let square = (num_tokens.max(1) as f64).powi(2);
        let slope = |&count: &u64| factor * count as f64 / square;
        expert_tokens.iter().map(slope).collect()
    }

    /// What a token's squared log of the sum of exponentials of its router logits is multiplied by in the z-loss of one
    /// layer, for a counted token of a sequence of `num_tokens` tokens.
    pub fn z_weight(&self, totals: &BatchTotals, num_tokens: usize) -> f64 {
        self.z_coefficient * self.share(totals) / num_tokens.max(1) as f64
    }

    /// Part of one sequence and layer in the whole.
    fn share(&self, totals: &BatchTotals) -> f64 {
        1.0 / (totals.sequences.max(1) as f64 * self.num_layers.max(1) as f64)
    }
}

/// The tokens that the router's losses and the selection bias count: all those of sequences with a scored token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CountedTokens {
    /// Which of the counted sequences each token is of, `[T]`; `None` where it is of none.
    pub sequence: Vec<Option<usize>>,
    /// Tokens of each counted sequence.
    pub lengths: Vec<usize>,
}

impl CountedTokens {
    /// Those of a batch.
    pub fn new(batch: &Batch) -> Self {
        let scored = batch.scored();
        let mut counted = Self {
            sequence: vec![None; batch.num_tokens()],
            lengths: Vec::new(),
        };
        for range in (0..batch.num_sequences()).map(|s| batch.sequence(s)) {
            if scored[range.clone()].contains(&true) {
                counted.sequence[range.clone()].fill(Some(counted.lengths.len()));
                counted.lengths.push(range.len());
            }
        }
        counted
    }

    /// Number of counted tokens.
    pub fn num_tokens(&self) -> usize {
        self.lengths.iter().sum()
    }
}

/// The selection bias of each expert (Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing"): added to the router's
/// softmax where experts are chosen, not where they are weighted. Every rank holds all of it. It is state of training:
/// saved in checkpoints, kept with snapshots, and no weight of the model.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertBias(Vec<Vec<f64>>);

impl ExpertBias {
    /// 0 for every expert.
    pub fn zeros(model: &ModelSpec) -> Self {
        Self(by_layer(model))
    }

    /// Of each expert of a layer, `[X]`; `None` where all are 0, so that the softmax alone decides.
    pub fn of(&self, layer: usize) -> Option<&[f64]> {
        let bias = self.0.get(layer)?;
        bias.iter().any(|&b| b != 0.0).then_some(bias)
    }

    /// After a committed step: each layer's bias moves by `rate` up for an expert with fewer tokens than the mean, down
    /// for one with more. `expert_tokens` are those of the whole step, as the reports of its `forward_backward` calls
    /// have them.
    pub fn update(&mut self, rate: f64, expert_tokens: &[Vec<u64>]) {
        for (bias, tokens) in self.0.iter_mut().zip(expert_tokens) {
            let sum: u64 = tokens.iter().sum();
            for (bias, &count) in bias.iter_mut().zip(tokens) {
                // count < sum / X, without its rounding.
                match (count * tokens.len() as u64).cmp(&sum) {
                    std::cmp::Ordering::Less => *bias += rate,
                    std::cmp::Ordering::Equal => {}
                    std::cmp::Ordering::Greater => *bias -= rate,
                }
            }
        }
    }

    /// Writes it, for a model with experts.
    ///
    /// # Errors
    /// The writer's.
    pub fn write(&self, writer: &mut dyn StateWriter) -> Result<()> {
        match self.0.iter().all(Vec::is_empty) {
            true => Ok(()),
            false => writer.blob(BIAS, serde_json::json!(self.0)),
        }
    }

    /// Reads it; 0 where it was not saved.
    ///
    /// # Errors
    /// `Checkpoint` if it is of another model.
    pub fn read(model: &ModelSpec, reader: &dyn StateReader) -> Result<Self> {
        let zeros = Self::zeros(model);
        let Some(value) = reader.blob(BIAS) else {
            return Ok(zeros);
        };
        let read: Option<Vec<Vec<f64>>> = serde_json::from_value(value.clone()).ok();
        let same = |read: &Vec<Vec<f64>>| {
            read.len() == zeros.0.len()
                && read.iter().zip(&zeros.0).all(|(a, b)| a.len() == b.len())
        };
        read.filter(same).map(Self).ok_or_else(|| {
            let message = "the selection bias of experts is of another model";
            Error::new(ErrorKind::Checkpoint, "load_state", message).with("blob", BIAS)
        })
    }

    /// Whether a checkpoint holds one that is not 0.
    pub(crate) fn is_saved(reader: &dyn StateReader) -> bool {
        let layers = reader.blob(BIAS).and_then(|v| v.as_array());
        let values = layers.into_iter().flatten().filter_map(|l| l.as_array());
        values.flatten().any(|v| v.as_f64() != Some(0.0))
    }
}

/// No tokens for any expert: what [`ForwardBackwardReport`](crate::engine::ForwardBackwardReport) begins with.
pub fn no_expert_tokens(model: &ModelSpec) -> Vec<Vec<u64>> {
    match model.moe {
        Some(_) => by_layer(model),
        None => Vec::new(),
    }
}

/// A value for each expert of each layer; nothing for layers without.
fn by_layer<T: Clone + Default>(model: &ModelSpec) -> Vec<Vec<T>> {
    let experts = model.moe.map_or(0, |m| m.num_experts);
    let of = |mlp| if mlp == MlpSpec::Moe { experts } else { 0 };
    let layers = model.layers.iter();
    layers.map(|l| vec![T::default(); of(l.mlp)]).collect()
}

#[cfg(test)]
mod tests;

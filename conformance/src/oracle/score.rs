//! From a micro-batch to its per-token numbers, and from their derivatives to the weights' gradients.

use std::sync::Arc;

use drivetrain_core::{
    Result,
    batch::Batch,
    model::ModelSpec,
    objective::{ObjectiveValue, TokenOutputs},
};
use indexmap::IndexMap;

use super::{
    defect::Defect,
    matrix::Matrix,
    model::{Parameters, Pass, Policy},
    router::Routed,
    tape::{Tape, Var},
};

/// What is to be computed for each scored token.
#[derive(Debug, Clone)]
pub(super) struct Wanted<'a> {
    pub(super) temperature: f64,
    pub(super) entropy: bool,
    pub(super) log_probs_at: Option<&'a str>,
}

/// A forward pass that can be carried back.
pub(super) struct Scored<'a> {
    pass: Pass<'a>,
    /// The tokens with outputs, which have a predecessor in their sequence.
    rows: Vec<usize>,
    num_tokens: usize,
    log_probs: Var,
    entropy: Option<Var>,
    log_probs_at: Option<(Var, usize)>,
}

impl<'a> Scored<'a> {
    /// Scores the `selected` tokens, none of which is the first of its sequence.
    pub(super) fn new(
        spec: &'a ModelSpec,
        policy: &'a Policy,
        batch: &Batch,
        selected: &[bool],
        wanted: &Wanted<'_>,
        defect: Option<Defect>,
    ) -> Result<Self> {
        let rows: Vec<_> = (0..batch.num_tokens()).filter(|&t| selected[t]).collect();
        let mut pass = Pass::new(spec, policy, batch, defect);
        let before = rows.iter().map(|t| t - 1).collect();
        let all = pass.log_probs_after(batch.tokens(), before, wanted.temperature); // [n, V]
        let targets = rows
            .iter()
            .map(|&t| vec![batch.tokens()[t] as usize])
            .collect();
        let log_probs = pass.tape.pick(all, targets);
        let entropy = wanted.entropy.then(|| {
            if defect == Some(Defect::EntropyWithoutTemperature) {
                let before = rows.iter().map(|t| t - 1).collect();
                let plain = pass.log_probs_after(batch.tokens(), before, 1.0);
                return pass.tape.entropy(plain);
            }
            pass.tape.entropy(all)
        });
        let log_probs_at = match wanted.log_probs_at {
            None => None,
            Some(name) => {
                let (ids, k) = batch.token_ids(name)?;
                let of = |t: &usize| ids[t * k..(t + 1) * k].iter().map(|&id| id as usize);
                let columns = rows.iter().map(|t| of(t).collect());
                Some((pass.tape.pick(all, columns.collect()), k))
            }
        };
        Ok(Self {
            pass,
            rows,
            num_tokens: batch.num_tokens(),
            log_probs,
            entropy,
            log_probs_at,
        })
    }

    /// The numbers of every token; 0 where it was not selected.
    pub(super) fn outputs(&self) -> TokenOutputs {
        let spread = |var: Var, k: usize| {
            let value = self.pass.tape.value(var);
            let mut all = vec![0.0; self.num_tokens * k];
            for (i, &t) in self.rows.iter().enumerate() {
                all[t * k..(t + 1) * k].copy_from_slice(value.row(i));
            }
            all
        };
        TokenOutputs {
            log_probs: spread(self.log_probs, 1),
            entropy: self.entropy.map(|var| spread(var, 1)),
            log_probs_at: self.log_probs_at.map(|(var, k)| spread(var, k)),
            values: None,
        }
    }

    /// The routing of the pass, and the tape that its values are on.
    pub(super) fn routing(&self) -> (&Tape, &[Routed]) {
        (&self.pass.tape, &self.pass.routed)
    }

    /// The gradient of every parameter, from the objective's derivatives and those of the router's losses; zeros where
    /// nothing reached it. `round` is what becomes of values that are kept for this.
    pub(super) fn backward(
        mut self,
        value: &ObjectiveValue,
        router: Vec<(Var, Matrix)>,
        round: Option<fn(f64) -> f64>,
    ) -> IndexMap<String, Matrix> {
        let chosen = |all: &[f64], k: usize| {
            let data = self.rows.iter().flat_map(|&t| &all[t * k..(t + 1) * k]);
            Matrix::new(self.rows.len(), k, data.copied().collect())
        };
        let mut seeds = router;
        seeds.push((self.log_probs, chosen(&value.d_log_probs, 1)));
        if let (Some(var), Some(d)) = (self.entropy, &value.d_entropy) {
            seeds.push((var, chosen(d, 1)));
        }
        if let (Some((var, k)), Some(d)) = (self.log_probs_at, &value.d_log_probs_at) {
            seeds.push((var, chosen(d, k)));
        }
        if let Some(round) = round {
            self.pass.tape.round_kept(round);
        }
        let tape = &self.pass.tape;
        let mut gradients = tape.backward(seeds);
        self.pass
            .parameters
            .iter()
            .map(|(name, &var)| {
                let shape = tape.value(var);
                let zeros = || Matrix::zeros(shape.rows, shape.cols);
                (name.clone(), gradients.take(var).unwrap_or_else(zeros))
            })
            .collect()
    }
}

/// Adds a micro-batch's gradients.
pub(super) fn accumulate(
    sum: &mut Option<IndexMap<String, Matrix>>,
    part: IndexMap<String, Matrix>,
) {
    match sum {
        None => *sum = Some(part),
        Some(sum) => {
            for (name, gradient) in &part {
                sum[name.as_str()].add_assign(gradient);
            }
        }
    }
}

/// Zeros in the shape of every weight.
pub(super) fn zeros_like(weights: &Parameters) -> IndexMap<String, Matrix> {
    let zeros = |w: &Arc<Matrix>| Matrix::zeros(w.rows, w.cols);
    weights.iter().map(|(n, w)| (n.clone(), zeros(w))).collect()
}

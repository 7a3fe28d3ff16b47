//! What a router is trained by beside the objective: the load-balancing loss and the z-loss, as the handbook writes
//! them, with their derivatives by its softmax and its logits.
//!
//! Shapes: T packed tokens, X experts.

use drivetrain_core::{
    Result,
    batch::{Batch, BatchTotals},
    communicator::Communicator,
    config::LoadBalancing,
    moe::{CountedTokens, RouterLosses},
};

use crate::compare::largest;

use super::{
    defect::Defect,
    matrix::Matrix,
    tape::{Tape, Var},
};

/// One layer's routing in a pass.
#[derive(Debug)]
pub(super) struct Routed {
    pub(super) layer: usize,
    /// `[T, X]`.
    pub(super) logits: Var,
    /// Their softmax, `[T, X]`.
    pub(super) probs: Var,
    /// `[T, k]`.
    pub(super) chosen: Vec<Vec<usize>>,
    /// See [`Scores::margin`].
    pub(super) margin: f64,
}

/// This rank's part of the losses of a micro-batch.
#[derive(Debug, Default)]
pub(super) struct RouterTerms {
    /// Without its coefficient.
    pub(super) balancing: f64,
    /// Without its coefficient.
    pub(super) z: f64,
    /// Derivatives of both, with their coefficients.
    pub(super) seeds: Vec<(Var, Matrix)>,
}

/// Tokens whose load is balanced together, in one layer.
struct Group {
    tokens: Vec<usize>,
    /// Over all ranks.
    num_tokens: f64,
    /// Over all ranks.
    num_sequences: f64,
    /// Over all ranks, `[X]`.
    expert_tokens: Vec<f64>,
}

/// What the losses are computed from.
pub(super) struct Losses<'a> {
    pub(super) losses: RouterLosses,
    pub(super) totals: &'a BatchTotals,
    pub(super) world: &'a dyn Communicator,
    pub(super) defect: Option<Defect>,
}

/// The tokens that count; one defect counts those of every sequence.
pub(super) fn counted(batch: &Batch, defect: Option<Defect>) -> CountedTokens {
    match defect {
        Some(Defect::UnscoredSequencesCount) => {
            let all =
                (0..batch.num_sequences()).flat_map(|s| vec![Some(s); batch.sequence(s).len()]);
            CountedTokens {
                sequence: all.collect(),
                lengths: batch.lengths(),
            }
        }
        _ => CountedTokens::new(batch),
    }
}

/// Adds the counted tokens of each expert.
pub(super) fn count(routed: &[Routed], counted: &CountedTokens, into: &mut [Vec<u64>]) {
    for layer in routed {
        for (chosen, _) in layer
            .chosen
            .iter()
            .zip(&counted.sequence)
            .filter(|(_, s)| s.is_some())
        {
            chosen.iter().for_each(|&e| into[layer.layer][e] += 1);
        }
    }
}

impl Losses<'_> {
    /// Collective where micro-batches are balanced over all ranks.
    pub(super) fn terms(
        &self,
        tape: &Tape,
        routed: &[Routed],
        counted: &CountedTokens,
    ) -> Result<RouterTerms> {
        let mut terms = RouterTerms::default();
        let mut sequences = self.totals.sequences.max(1) as f64;
        if self.is(Defect::RouterLossesPerMicrobatch) {
            sequences = counted.lengths.len().max(1) as f64;
        }
        let share = 1.0 / (sequences * self.losses.num_layers.max(1) as f64);
        for layer in routed {
            if let Some(form) = self.losses.balancing {
                self.balance(form, tape, layer, counted, share, &mut terms)?;
            }
            if self.losses.z_coefficient != 0.0 {
                self.square(tape, layer, counted, share, &mut terms);
            }
        }
        Ok(terms)
    }

    fn balance(
        &self,
        form: LoadBalancing,
        tape: &Tape,
        layer: &Routed,
        counted: &CountedTokens,
        share: f64,
        terms: &mut RouterTerms,
    ) -> Result<()> {
        let mut probs = tape.value(layer.probs).clone();
        if self.is(Defect::SoftmaxTwice) {
            (0..probs.rows).for_each(|r| softmax(probs.row_mut(r)));
        }
        let num_experts = probs.cols as f64;
        let mut slopes = Matrix::zeros(probs.rows, probs.cols);
        for group in self.groups(form, layer, counted, probs.cols)? {
            let n = group.num_tokens.max(1.0);
            let weight = share * group.num_sequences * num_experts;
            for (e, &tokens) in group.expert_tokens.iter().enumerate() {
                let fraction = tokens / n;
                let mean = group.tokens.iter().map(|&t| probs.row(t)[e]).sum::<f64>() / n;
                terms.balancing += weight * fraction * mean;
                for &t in &group.tokens {
                    slopes.row_mut(t)[e] =
                        self.losses.balancing_coefficient * weight * fraction / n;
                }
            }
        }
        if !self.is(Defect::BalancingGradientDropped) {
            terms.seeds.push((layer.probs, slopes));
        }
        Ok(())
    }

    fn groups(
        &self,
        form: LoadBalancing,
        layer: &Routed,
        counted: &CountedTokens,
        num_experts: usize,
    ) -> Result<Vec<Group>> {
        let group = |tokens: Vec<usize>, num_sequences: usize| {
            let mut expert_tokens = vec![0.0; num_experts];
            for &t in &tokens {
                layer.chosen[t]
                    .iter()
                    .for_each(|&e| expert_tokens[e] += 1.0);
            }
            Group {
                num_tokens: tokens.len() as f64,
                num_sequences: num_sequences as f64,
                expert_tokens,
                tokens,
            }
        };
        let of = |wanted: &dyn Fn(usize) -> bool| -> Vec<usize> {
            let tokens = counted.sequence.iter().enumerate();
            let chosen = tokens.filter(|(_, s)| s.is_some_and(wanted));
            chosen.map(|(t, _)| t).collect()
        };
        let num_sequences = counted.lengths.len();
        match form {
            LoadBalancing::Sequence => Ok((0..num_sequences)
                .map(|s| group(of(&|other| other == s), 1))
                .collect()),
            LoadBalancing::Global => {
                let mut all = group(of(&|_| true), num_sequences);
                let mut sums = all.expert_tokens.clone();
                sums.extend([all.num_tokens, all.num_sequences]);
                if !self.is(Defect::BalancedAlone) {
                    self.world.sum_f64(&mut sums)?;
                    all.num_sequences = sums[num_experts + 1];
                }
                all.num_tokens = sums[num_experts];
                sums.truncate(num_experts);
                all.expert_tokens = sums;
                Ok(vec![all])
            }
        }
    }

    fn square(
        &self,
        tape: &Tape,
        layer: &Routed,
        counted: &CountedTokens,
        share: f64,
        terms: &mut RouterTerms,
    ) {
        let mut slopes = tape.value(layer.logits).clone();
        for (t, sequence) in counted.sequence.iter().enumerate() {
            let row = slopes.row_mut(t);
            let Some(sequence) = *sequence else {
                row.fill(0.0);
                continue;
            };
            let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let log = max + row.iter().map(|x| (x - max).exp()).sum::<f64>().ln();
            let weight = share / counted.lengths[sequence] as f64;
            terms.z += weight * log * log;
            softmax(row);
            let factor = self.losses.z_coefficient * weight * 2.0 * log;
            row.iter_mut().for_each(|p| *p *= factor);
        }
        if !self.is(Defect::ZLossGradientDropped) {
            terms.seeds.push((layer.logits, slopes));
        }
    }

    fn is(&self, defect: Defect) -> bool {
        self.defect == Some(defect)
    }
}

fn softmax(row: &mut [f64]) {
    let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    row.iter_mut().for_each(|x| *x = (*x - max).exp());
    let sum: f64 = row.iter().sum();
    row.iter_mut().for_each(|x| *x /= sum);
}

/// Columns of the k largest scores of each row, of equal ones the first.
pub(super) fn top_k(scores: &Matrix, k: usize) -> Vec<Vec<usize>> {
    (0..scores.rows)
        .map(|r| {
            let mut order = by_score(scores.row(r));
            order.truncate(k);
            order
        })
        .collect()
}

/// What experts are chosen by, each `[T, X]`.
pub(super) struct Scores<'a> {
    pub(super) logits: &'a Matrix,
    pub(super) probs: &'a Matrix,
    /// Softmax and bias; `None` where there is none.
    pub(super) biased: Option<&'a Matrix>,
}

impl Scores<'_> {
    /// How far the choices of k experts are from others, in units of what they are rounded by: the least distance, over
    /// all tokens, of the last chosen expert's score to the next one's. Logits are rounded as parts of the token's
    /// largest; softmax values as parts of themselves, and with a bias once more, by their last digit, which is far
    /// less than what a chain of products leaves.
    pub(super) fn margin(&self, k: usize) -> f64 {
        const LAST_DIGIT: f64 = 1.0 / 64.0;
        let of_row = |r: usize| {
            let row = self.biased.unwrap_or(self.logits).row(r);
            let order = by_score(row);
            let (last, next) = (order[k - 1], *order.get(k)?);
            let probs = self.probs.row(r);
            let unit = match self.biased {
                None => largest(row).max(1.0),
                Some(_) => {
                    let digits = LAST_DIGIT * (row[last].abs() + row[next].abs());
                    probs[last] + probs[next] + digits
                }
            };
            Some((row[last] - row[next]) / unit)
        };
        let rows = 0..self.logits.rows;
        rows.filter_map(of_row).fold(f64::INFINITY, f64::min)
    }
}

fn by_score(row: &[f64]) -> Vec<usize> {
    let mut order: Vec<_> = (0..row.len()).collect();
    order.sort_by(|&a, &b| row[b].total_cmp(&row[a]).then(a.cmp(&b)));
    order
}

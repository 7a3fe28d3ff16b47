//! What routers are trained by beside the objective: the derivatives of their losses, and how many tokens each expert
//! got.

use std::collections::BTreeMap;

use drivetrain_core::{
    Result,
    batch::{Batch, BatchTotals},
    communicator::Communicator,
    config::LoadBalancing,
    engine::ForwardBackwardReport,
    moe::{CountedTokens, LOAD_BALANCING_LOSS, ROUTER_Z_LOSS, RouterLosses},
};
use tch::{Kind, Tensor};

use crate::{
    error::{Torch, torch},
    model::Routing,
};

/// Derivatives of a layer's router losses; `None` where there is no such loss.
#[derive(Debug, Default)]
pub(crate) struct RouterGradients {
    /// By the softmax, `[T, X]`.
    pub(crate) probs: Option<Tensor>,
    /// By the log of the sum of exponentials, `[T]`.
    pub(crate) log_sum: Option<Tensor>,
}

/// A micro-batch whose routers are to be trained.
pub(crate) struct RouterPass<'a> {
    pub(crate) losses: RouterLosses,
    pub(crate) part: &'a Batch,
    pub(crate) totals: &'a BatchTotals,
    pub(crate) data: &'a dyn Communicator,
}

impl RouterPass<'_> {
    /// The derivatives of each layer that was routed; losses and tokens go into the report, whose counts are there for
    /// every layer. Collective where a micro-batch is balanced over all ranks.
    pub(crate) fn gradients(
        &self,
        routed: &BTreeMap<usize, &Routing>,
        report: &mut ForwardBackwardReport,
    ) -> Result<BTreeMap<usize, RouterGradients>> {
        let counted = CountedTokens::new(self.part);
        let groups = self.groups(&counted, routed, report)?;
        let mut gradients = BTreeMap::new();
        for (&layer, routing) in routed {
            let of_layer = self.layer(&counted, routing, groups.get(&layer), report);
            gradients.insert(layer, of_layer.map_err(torch("router_losses"))?);
        }
        Ok(gradients)
    }

    /// By layer, the slopes of each group whose load is balanced together.
    fn groups(
        &self,
        counted: &CountedTokens,
        routed: &BTreeMap<usize, &Routing>,
        report: &mut ForwardBackwardReport,
    ) -> Result<BTreeMap<usize, Vec<Vec<f64>>>> {
        let num_experts = self.losses.num_experts;
        let mut by_layer = BTreeMap::new();
        let mut all = Vec::new();
        for (layer, totals) in report.expert_tokens.iter_mut().enumerate() {
            if totals.is_empty() {
                continue;
            }
            let mut of_sequences = vec![vec![0u64; num_experts]; counted.lengths.len()];
            if let Some(routing) = routed.get(&layer) {
                count(counted, routing, &mut of_sequences);
            }
            let mut sum = vec![0u64; num_experts];
            for tokens in &of_sequences {
                sum.iter_mut().zip(tokens).for_each(|(sum, n)| *sum += n);
            }
            totals
                .iter_mut()
                .zip(&sum)
                .for_each(|(total, n)| *total += n);
            all.extend(sum.iter().map(|&n| n as f64));
            if self.losses.balancing == Some(LoadBalancing::Sequence) {
                let slopes = |(tokens, &n): (&Vec<u64>, &usize)| {
                    self.losses.balancing_slopes(self.totals, 1, n, tokens)
                };
                let of_groups = of_sequences.iter().zip(&counted.lengths).map(slopes);
                by_layer.insert(layer, of_groups.collect());
            }
        }
        if self.losses.balancing == Some(LoadBalancing::Global) {
            all.extend([counted.lengths.len() as f64, counted.num_tokens() as f64]);
            self.data.sum_f64(&mut all)?;
            let (sequences, tokens) = (all[all.len() - 2] as usize, all[all.len() - 1] as usize);
            let layers = (report.expert_tokens.iter().enumerate()).filter(|(_, t)| !t.is_empty());
            for ((layer, _), counts) in layers.zip(all.chunks_exact(num_experts)) {
                let counts: Vec<_> = counts.iter().map(|&n| n as u64).collect();
                let slopes = self
                    .losses
                    .balancing_slopes(self.totals, sequences, tokens, &counts);
                by_layer.insert(layer, vec![slopes]);
            }
        }
        Ok(by_layer)
    }

    fn layer(
        &self,
        counted: &CountedTokens,
        routing: &Routing,
        groups: Option<&Vec<Vec<f64>>>,
        report: &mut ForwardBackwardReport,
    ) -> Torch<RouterGradients> {
        let kind = routing.probs.f_kind()?;
        let mut gradients = RouterGradients::default();
        if let Some(groups) = groups {
            let num_experts = self.losses.num_experts;
            let mut rows = vec![0.0; counted.sequence.len() * num_experts];
            for (row, sequence) in rows.chunks_exact_mut(num_experts).zip(&counted.sequence) {
                if let Some(sequence) = *sequence {
                    // One group, or one a sequence.
                    row.copy_from_slice(&groups[sequence.min(groups.len() - 1)]);
                }
            }
            let slopes = Tensor::f_from_slice(&rows)?
                .f_view([-1, num_experts as i64])?
                .f_to_device(routing.probs.device())?;
            let loss = slopes
                .f_mul(&double(&routing.probs)?)?
                .f_sum(Kind::Double)?;
            let loss = f64::try_from(&loss)? / self.losses.balancing_coefficient;
            report.metrics.sum(LOAD_BALANCING_LOSS, loss);
            gradients.probs = Some(slopes.f_to_kind(kind)?);
        }
        if self.losses.z_coefficient != 0.0 {
            let weight = |sequence: &Option<usize>| match *sequence {
                Some(sequence) => self.losses.z_weight(self.totals, counted.lengths[sequence]),
                None => 0.0,
            };
            let weights: Vec<_> = counted.sequence.iter().map(weight).collect();
            let log_sum = double(&routing.log_sum)?;
            let weights = Tensor::f_from_slice(&weights)?.f_to_device(log_sum.device())?;
            let slopes = weights.f_mul(&log_sum)?;
            let loss = f64::try_from(&slopes.f_dot(&log_sum)?)? / self.losses.z_coefficient;
            report.metrics.sum(ROUTER_Z_LOSS, loss);
            gradients.log_sum = Some(slopes.f_mul_scalar(2.0)?.f_to_kind(kind)?);
        }
        Ok(gradients)
    }
}

/// Counted tokens of each sequence and expert.
fn count(counted: &CountedTokens, routing: &Routing, of_sequences: &mut [Vec<u64>]) {
    let k = routing.chosen.len() / counted.sequence.len().max(1);
    for (experts, sequence) in routing.chosen.chunks_exact(k.max(1)).zip(&counted.sequence) {
        if let Some(sequence) = *sequence {
            for &expert in experts {
                of_sequences[sequence][expert as usize] += 1;
            }
        }
    }
}

fn double(values: &Tensor) -> Torch<Tensor> {
    values.f_detach()?.f_to_kind(Kind::Double)
}

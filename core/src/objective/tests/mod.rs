//! What holds of every built-in objective, on generated ragged batches.

mod cuts;
mod derivatives;
mod faults;
mod values;

use proptest::prelude::*;

use super::*;
use crate::{
    batch::{BatchBuilder, Column, ColumnData},
    config::{KlEstimator, LossAggregation, ObjectiveConfig, ObjectiveKind},
};

/// Sequences of a generated batch at most, and tokens of each.
const MOST_SEQUENCES: usize = 8;
const MOST_TOKENS: usize = 9;

/// A batch with every column, and what an engine would have computed for it.
#[derive(Debug, Clone)]
pub(super) struct Case {
    pub(super) batch: Batch,
    pub(super) outputs: TokenOutputs,
}

/// Every kind, with every aggregation and every added term among them.
pub(super) fn objectives() -> Vec<BuiltinObjective> {
    use LossAggregation::{Constant, SequenceMean, TokenMean};
    use ObjectiveKind::{Cispo, Dapo, Dpo, Grpo, Gspo, Nll, Ppo};
    let mut configs = Vec::new();
    for kind in [Nll, Ppo, Grpo, Dapo, Gspo, Cispo, Dpo] {
        let plain = ObjectiveConfig {
            kind,
            clip_low: (kind == Gspo).then_some(0.1),
            clip_high: matches!(kind, Gspo | Cispo).then_some(0.15),
            ..ObjectiveConfig::default()
        };
        configs.push(plain.clone());
        for (aggregation, estimator) in [
            (TokenMean, KlEstimator::K1),
            (SequenceMean, KlEstimator::K2),
            (Constant, KlEstimator::K3),
        ] {
            configs.push(ObjectiveConfig {
                aggregation: Some(aggregation),
                divisor: Some(7.5),
                dual_clip: Some(1.3),
                kl_coefficient: 0.3,
                kl_estimator: Some(estimator),
                entropy_coefficient: 0.2,
                beta: Some(0.7),
                label_smoothing: 0.1,
                ..plain.clone()
            });
        }
    }
    configs.iter().map(|c| from_config(c).unwrap()).collect()
}

/// Pairs of sequences of 1 to 9 tokens; a sequence may have no scored token, or one, and so may a batch.
pub(super) fn cases() -> impl Strategy<Value = Case> {
    let numbers = |range: std::ops::Range<f64>| {
        proptest::collection::vec(range, MOST_SEQUENCES * MOST_TOKENS)
    };
    let sequence = (
        1..=MOST_TOKENS,
        prop_oneof![Just(0u16), Just(4), any::<u16>()],
    );
    (
        proptest::collection::vec((sequence.clone(), sequence), 0..=MOST_SEQUENCES / 2),
        numbers(-6.0..-0.01),
        numbers(-0.6..0.6),
        numbers(-0.9..0.9),
        numbers(-2.0..2.0),
        numbers(0.0..4.0),
    )
        .prop_map(|(pairs, log_probs, old, reference, advantages, entropy)| {
            let mut builder = BatchBuilder::new();
            let mut num_tokens = 0;
            for &(length, bits) in pairs.iter().flat_map(|(a, b)| [a, b]) {
                let mask: Vec<bool> = (0..length).map(|t| bits >> t & 1 == 1).collect();
                builder.push(&vec![1; length], Some(&mask)).unwrap();
                num_tokens += length;
            }
            builder.groups((0..=pairs.len()).map(|pair| 2 * pair).collect());
            let add = |deltas: &[f64]| {
                let sums = log_probs.iter().zip(deltas).map(|(l, d)| l + d);
                Column::per_token(ColumnData::F64(sums.take(num_tokens).collect()))
            };
            builder.column(OLD_LOG_PROBS, add(&old));
            builder.column(REFERENCE_LOG_PROBS, add(&reference));
            let advantages = advantages[..2 * pairs.len()].to_vec();
            builder.column(
                ADVANTAGES,
                Column::per_sequence(ColumnData::F64(advantages)),
            );
            Case {
                batch: builder.build().unwrap(),
                outputs: TokenOutputs {
                    log_probs: log_probs[..num_tokens].to_vec(),
                    entropy: Some(entropy[..num_tokens].to_vec()),
                    ..TokenOutputs::default()
                },
            }
        })
}

impl Case {
    /// Prepares a copy of the batch and evaluates it whole.
    pub(super) fn evaluate(&self, objective: &dyn Objective) -> Result<ObjectiveValue> {
        let (batch, totals) = self.prepare(objective)?;
        objective.evaluate(&batch, &self.outputs, &totals)
    }

    pub(super) fn prepare(&self, objective: &dyn Objective) -> Result<(Batch, BatchTotals)> {
        let mut batch = self.batch.clone();
        let mut totals = BatchTotals::count(&batch);
        objective.prepare(&mut batch, &mut totals)?;
        Ok((batch, totals))
    }

    /// Replaces one number of a per-token column.
    pub(super) fn edit(&mut self, column: &str, edit: impl FnOnce(&mut [f64])) {
        let mut edited = self.batch.column(column).unwrap().clone();
        let ColumnData::F64(values) = &mut edited.data else {
            panic!("generated columns are f64");
        };
        edit(values);
        self.batch.set_column(column, edited).unwrap();
    }
}

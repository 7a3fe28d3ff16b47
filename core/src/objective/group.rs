//! Advantages relative to a group: the answers to one prompt.

use super::{ADVANTAGES, Objective, REWARDS, scored::Scored};
use crate::{
    Result,
    batch::{Batch, Column, ColumnData, ColumnScope},
};

/// Keeps a group of equal rewards from being divided by 0.
const EPSILON: f64 = 1e-6;

/// `(reward - mean) / (std + 1e-6)` within each group (Shao et al. 2024, section 4.1.2), `[B]`, with the sample
/// standard deviation (over n - 1). A group of one has advantage 0: there is nothing to compare it with.
///
/// Only sequences that `scored` selects take part; the others get 0, and their rewards may be anything.
pub fn group_advantages(rewards: &[f64], groups: &[usize], scored: &[bool]) -> Vec<f64> {
    let mut advantages = vec![0.0; rewards.len()];
    for group in groups.windows(2) {
        let members: Vec<usize> = (group[0]..group[1]).filter(|&s| scored[s]).collect();
        if members.len() < 2 {
            continue;
        }
        let count = members.len() as f64;
        let mean = members.iter().map(|&s| rewards[s]).sum::<f64>() / count;
        let square_sum: f64 = members.iter().map(|&s| (rewards[s] - mean).powi(2)).sum();
        let std = (square_sum / (count - 1.0)).sqrt();
        for s in members {
            advantages[s] = (rewards[s] - mean) / (std + EPSILON);
        }
    }
    advantages
}

/// The `prepare` of the group-relative objectives: makes `advantages` of `rewards` where the batch has none,
/// then checks every column.
pub(super) fn prepare_advantages(objective: &dyn Objective, global: &mut Batch) -> Result<()> {
    if global.column(ADVANTAGES).is_none() {
        let column = advantages_of_rewards(objective.name(), global)?;
        global.set_column(ADVANTAGES, column)?;
    }
    Scored::new(objective.name(), global).check_columns(&objective.requires())
}

fn advantages_of_rewards(objective: &str, global: &Batch) -> Result<Column> {
    let scored = Scored::new(objective, global);
    let rewards = match global.column(REWARDS) {
        None => {
            let message = format!(
                "the objective `{objective}` needs the column `{ADVANTAGES}`, or `{REWARDS}` to make it of"
            );
            return Err(scored.data_error(message, ADVANTAGES));
        }
        Some(column) if column.scope != ColumnScope::Sequence => {
            return Err(scored.data_error("rewards must be one number a sequence", REWARDS));
        }
        // Checked at the scored sequences, the others being masked.
        Some(column) => {
            scored.column(REWARDS)?;
            column.to_f64()
        }
    };
    let alone = global.groups().windows(2).all(|g| g[1] - g[0] < 2);
    if alone && global.num_sequences() > 0 {
        let message =
            "rewards are compared within a group, and every sequence is a group of its own";
        return Err(scored.data_error(message, REWARDS).help(
            "put the answers to one prompt into a group: in jsonl lines next to each other with the same `group`, in \
             code `BatchBuilder::groups`; or bring `advantages`",
        ));
    }
    let mut is_scored = vec![false; global.num_sequences()];
    for sequence in scored.sequences() {
        is_scored[sequence.index] = true;
    }
    let advantages = group_advantages(&rewards, global.groups(), &is_scored);
    Ok(Column::per_sequence(ColumnData::F64(advantages)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        ErrorKind,
        batch::{BatchBuilder, BatchTotals},
        config::{ObjectiveConfig, ObjectiveKind},
        objective::from_config,
    };

    #[test]
    fn by_hand() {
        let rewards = [1.0, 3.0, 5.0, 7.0, f64::NAN];
        let scored = [true, true, true, true, false];
        let found = group_advantages(&rewards, &[0, 3, 5], &scored);
        // Mean 3, sample deviation 2; then a group of one.
        for (found, expected) in found.iter().zip([-1.0, 0.0, 1.0, 0.0, 0.0]) {
            assert!((found - expected).abs() < 1e-6, "{found} for {expected}");
        }
    }

    #[test]
    fn sequences_that_are_all_alone_are_refused() {
        let mut builder = BatchBuilder::new();
        builder.push(&[1, 2], None).unwrap();
        builder.push(&[1, 3], None).unwrap();
        let rewards = ColumnData::F64(vec![1.0, 0.0]);
        builder.column(REWARDS, Column::per_sequence(rewards));
        let mut batch = builder.build().unwrap();
        let mut totals = BatchTotals::count(&batch);
        let config = ObjectiveConfig {
            kind: ObjectiveKind::Grpo,
            ..ObjectiveConfig::default()
        };
        let objective = from_config(&config).unwrap();
        let error = objective.prepare(&mut batch, &mut totals).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Data);
        assert!(error.remedy().unwrap().contains("`group`"), "{error}");
    }

    #[test]
    fn equal_rewards_have_no_advantage() {
        let found = group_advantages(&[0.5; 4], &[0, 4], &[true; 4]);
        assert_eq!(found, [0.0; 4]);
    }
}

//! Columns that the engine itself can compute: log-probs of the policy as it is, and of the reference.

use crate::{
    Result,
    batch::{Batch, Column, ColumnData},
    engine::{Engine, ScoreRequest, Weights},
    objective::Objective,
};

/// Snapshot tag of the reference policy.
pub const REFERENCE: &str = "reference";

/// Adds `old_log_probs` (the policy before this step) and `reference_log_probs` (the snapshot `reference`)
/// where the objective needs them and the data does not bring them.
///
/// # Errors
/// The engine's.
pub fn complete(
    share: &mut Batch,
    engine: &mut dyn Engine,
    objective: &dyn Objective,
) -> Result<()> {
    let requires = objective.requires();
    for (name, weights) in [
        ("old_log_probs", Weights::Policy),
        ("reference_log_probs", Weights::Tag(REFERENCE.to_owned())),
    ] {
        if requires.columns.iter().any(|c| c == name) && share.column(name).is_none() {
            let request = ScoreRequest {
                weights,
                temperature: requires.temperature,
                ..ScoreRequest::default()
            };
            let log_probs = engine.forward(share, &request)?.log_probs;
            share.set_column(name, Column::per_token(ColumnData::F64(log_probs)))?;
        }
    }
    Ok(())
}

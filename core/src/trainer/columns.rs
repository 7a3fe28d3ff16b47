//! Columns that the engine itself can compute: log-probs of the policy as it is, and of the reference.

use crate::{
    Error, ErrorKind, Result,
    batch::{Batch, BatchTotals, Column, ColumnData},
    engine::{Engine, ScoreRequest, Weights},
    objective::Objective,
};

/// Snapshot tag of the reference policy.
pub const REFERENCE: &str = "reference";

/// Columns that [`complete`] adds.
const COMPLETED: [&str; 2] = ["old_log_probs", "reference_log_probs"];

/// Whether a global batch, as the data gives it, brings every column that the objective reads, but for those that
/// [`complete`] adds.
///
/// # Errors
/// `Data` naming the column; what [`Objective::prepare`] finds.
pub fn check_columns(batch: &Batch, objective: &dyn Objective) -> Result<()> {
    let mut global = batch.clone();
    let mut totals = BatchTotals::count(&global);
    objective.prepare(&mut global, &mut totals)?;
    let requires = objective.requires();
    let missing = requires
        .columns
        .iter()
        .find(|name| !COMPLETED.contains(&name.as_str()) && global.column(name).is_none());
    missing.map_or(Ok(()), |name| {
        let message = "the objective reads a column that the data does not bring";
        Err(Error::new(ErrorKind::Data, "check_columns", message)
            .with("column", name)
            .help("give every line a field of this name, or choose another objective.kind"))
    })
}

/// Adds `old_log_probs` (the policy before this step) and `reference_log_probs` (the snapshot `reference`)
/// where the objective needs them and the data does not bring them. Collective.
///
/// # Errors
/// The engine's.
pub fn complete(
    share: &mut Batch,
    engine: &mut dyn Engine,
    objective: &dyn Objective,
) -> Result<()> {
    let requires = objective.requires();
    let [old, reference] = COMPLETED;
    for (name, weights) in [
        (old, Weights::Policy),
        (reference, Weights::Tag(REFERENCE.to_owned())),
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

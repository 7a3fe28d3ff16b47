//! Scores of a global batch, in its own order, however it is cut over the ranks.

use drivetrain_core::{
    Result,
    batch::Batch,
    communicator::Communicator,
    engine::{Engine, ScoreRequest},
    mesh::DeviceMesh,
    plan::MicrobatchPlan,
};

/// Log-probs and entropies (0 where not asked for) of every token of `global`, `[T]` each. Collective.
pub(super) fn global_scores(
    engine: &mut dyn Engine,
    global: &Batch,
    plan: &MicrobatchPlan,
    mesh: &DeviceMesh,
    world: &dyn Communicator,
    request: &ScoreRequest,
) -> Result<(Vec<f64>, Vec<f64>)> {
    let rank = mesh.data_index(world.rank());
    let outputs = engine.forward(&plan.share(global, rank)?, request)?;
    let mut all = vec![0.0; global.num_tokens() * 2];
    let (log_probs, entropies) = all.split_at_mut(global.num_tokens());
    // Model-parallel peers have the same scores: one of them gives them to the sum, so that bits stay.
    if mesh.is_data_leader(world.rank()) {
        let mut at = 0;
        for sequence in plan.sequences(rank) {
            let range = global.sequence(sequence);
            let end = at + range.len();
            log_probs[range.clone()].copy_from_slice(&outputs.log_probs[at..end]);
            if let Some(entropy) = &outputs.entropy {
                entropies[range].copy_from_slice(&entropy[at..end]);
            }
            at = end;
        }
    }
    world.sum_f64(&mut all)?;
    let entropies = all.split_off(global.num_tokens());
    Ok((all, entropies))
}

//! State out and in. Every rank holds all of it, so rank 0 writes it.

use std::sync::Arc;

use drivetrain_core::{
    Result, View,
    checkpoint::{
        SaveHandle, StatePiece, StateReader, StateSlot, StateWriter, read_step, write_step,
    },
    moe::ExpertBias,
};

use super::{defect::Defect, engine::ReferenceEngine, matrix::Matrix};

pub(super) fn save(
    engine: &ReferenceEngine,
    mut writer: Box<dyn StateWriter>,
) -> Result<SaveHandle> {
    if engine.world.rank() == 0 {
        for spec in &engine.plan.parameters {
            for (slot, values) in [
                (StateSlot::Weight, &*engine.policy.weights[&spec.name]),
                (StateSlot::ExpAvg, &engine.optimizer.exp_avg[&spec.name]),
                (
                    StateSlot::ExpAvgSq,
                    &engine.optimizer.exp_avg_sq[&spec.name],
                ),
            ] {
                let whole = 0..spec.num_elements();
                writer.piece(StatePiece {
                    name: &spec.name,
                    slot,
                    shape: &spec.shape,
                    runs: std::iter::once(whole).collect(),
                    data: View::F64(&values.data),
                })?;
            }
        }
    }
    engine.policy.bias.write(&mut *writer)?;
    write_step(&mut *writer, engine.step)?;
    writer.finish()
}

pub(super) fn load(engine: &mut ReferenceEngine, reader: &dyn StateReader) -> Result<()> {
    let step = read_step(reader)?;
    for spec in engine.plan.parameters.clone() {
        let read = |slot| {
            let whole = 0..spec.num_elements();
            let values = reader.read_f64(&spec.name, slot, std::slice::from_ref(&whole))?;
            Ok(Matrix::with_shape(&spec.shape, values))
        };
        engine.policy.weights[&spec.name] = Arc::new(read(StateSlot::Weight)?);
        if !engine.is(Defect::MomentsNotRestored) {
            engine.optimizer.exp_avg[&spec.name] = read(StateSlot::ExpAvg)?;
            engine.optimizer.exp_avg_sq[&spec.name] = read(StateSlot::ExpAvgSq)?;
        }
    }
    if !engine.is(Defect::StepNotRestored) {
        engine.step = step;
    }
    if !engine.is(Defect::BiasNotRestored) {
        engine.policy.bias = ExpertBias::read(&engine.plan.model, reader)?;
    }
    engine.gradients = None;
    Ok(())
}

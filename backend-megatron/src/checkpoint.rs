//! State in and out: of each bucket, the share this rank owns, in Hugging Face coordinates.

use drivetrain_core::{
    Result,
    checkpoint::{
        StatePiece, StateReader, StateSlot, StateWriter, read_into, read_step, write_step,
    },
};

use crate::{
    data_parallel::DataParallel,
    optimizer::Optimizer,
    weights::{Buffers, Layout},
};

/// Writes this rank's pieces and the step; the caller finishes the writer.
///
/// # Errors
/// The writer's.
pub(crate) fn save(
    layout: &Layout,
    data: &DataParallel,
    params: &Buffers,
    optimizer: &Optimizer,
    writer: &mut dyn StateWriter,
) -> Result<()> {
    for (bucket, places) in layout.buckets().iter().enumerate() {
        let own = data.own(bucket);
        let [m, v] = &optimizer.moments[bucket];
        let weights = &params.bucket(bucket)[own.clone()];
        for piece in places.pieces(own.clone()) {
            let spec = &layout.parameters()[piece.parameter];
            let local = piece.range.start - own.start..piece.range.end - own.start;
            for (slot, values) in [
                (StateSlot::Weight, weights),
                (StateSlot::ExpAvg, m),
                (StateSlot::ExpAvgSq, v),
            ] {
                writer.piece(StatePiece {
                    name: &spec.name,
                    slot,
                    shape: &spec.shape,
                    runs: piece.runs.clone(),
                    data: values[local.clone()].into(),
                })?;
            }
        }
    }
    write_step(writer, optimizer.step)
}

/// What was saved, for this rank: all weights, its share of the moments, and the step.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) params: Buffers,
    pub(crate) moments: Vec<[Vec<f32>; 2]>,
    pub(crate) step: u64,
}

/// Reads a state that any engine in any layout saved.
///
/// # Errors
/// The reader's.
pub(crate) fn load(
    layout: &Layout,
    data: &DataParallel,
    reader: &dyn StateReader,
) -> Result<Loaded> {
    let step = read_step(reader)?;
    let mut loaded = Loaded {
        params: Buffers::zeros(layout),
        moments: Optimizer::zero_moments(data),
        step,
    };
    for (bucket, places) in layout.buckets().iter().enumerate() {
        for piece in places.pieces(0..places.len()) {
            let name = &layout.parameters()[piece.parameter].name;
            let target = &mut loaded.params.bucket_mut(bucket)[piece.range];
            read_into(reader, name, StateSlot::Weight, &piece.runs, target)?;
        }
        let own = data.own(bucket);
        for piece in places.pieces(own.clone()) {
            let name = &layout.parameters()[piece.parameter].name;
            let local = piece.range.start - own.start..piece.range.end - own.start;
            for (slot, moment) in [StateSlot::ExpAvg, StateSlot::ExpAvgSq]
                .into_iter()
                .zip(&mut loaded.moments[bucket])
            {
                read_into(reader, name, slot, &piece.runs, &mut moment[local.clone()])?;
            }
        }
    }
    Ok(loaded)
}

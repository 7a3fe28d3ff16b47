//! State in and out: of each region, the share this rank owns, in Hugging Face coordinates.

use drivetrain_core::{
    Result,
    checkpoint::{
        StatePiece, StateReader, StateSlot, StateWriter, read_into, read_step, write_step,
    },
    model::ModelSpec,
    moe::ExpertBias,
};
use drivetrain_kernels::{Memory, Processor};

use crate::{
    data_parallel::DataParallel,
    optimizer::Optimizer,
    weights::{Buffers, Layout, Policy},
};

/// Writes this rank's pieces and the step; the caller finishes the writer.
///
/// # Errors
/// The writer's.
pub(crate) fn save(
    layout: &Layout,
    data: &DataParallel,
    policy: &Policy,
    optimizer: &Optimizer,
    writer: &mut dyn StateWriter,
) -> Result<()> {
    for region in 0..data.num_regions() {
        let own = data.own(region);
        let [m, v] = &optimizer.moments[region];
        let weights = &policy.params.bucket(data.region(region).bucket)[own.clone()];
        for piece in layout.pieces(region, own.clone()) {
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
    policy.bias.write(writer)?;
    write_step(writer, optimizer.step)
}

/// What was saved, for this rank: the weights it holds, its shares of the moments, and the step.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) policy: Policy,
    pub(crate) moments: Vec<[Memory; 2]>,
    pub(crate) step: u64,
}

/// Reads a state that any engine in any layout saved.
///
/// # Errors
/// The reader's.
pub(crate) fn load(
    (model, layout): (&ModelSpec, &Layout),
    (data, processor): (&DataParallel, &Processor),
    reader: &dyn StateReader,
) -> Result<Loaded> {
    let step = read_step(reader)?;
    let mut loaded = Loaded {
        policy: Policy {
            params: Buffers::zeros(layout, processor),
            bias: ExpertBias::read(model, reader)?,
        },
        moments: Optimizer::zero_moments(data, processor),
        step,
    };
    for (bucket, part) in layout.parts() {
        let name = &layout.parameters()[part.parameter].name;
        let target = &mut loaded.policy.params.bucket_mut(bucket)[part.range.clone()];
        read_into(reader, name, StateSlot::Weight, &part.runs, target)?;
    }
    for region in 0..data.num_regions() {
        let own = data.own(region);
        for piece in layout.pieces(region, own.clone()) {
            let name = &layout.parameters()[piece.parameter].name;
            let local = piece.range.start - own.start..piece.range.end - own.start;
            for (slot, moment) in [StateSlot::ExpAvg, StateSlot::ExpAvgSq]
                .into_iter()
                .zip(&mut loaded.moments[region])
            {
                read_into(reader, name, slot, &piece.runs, &mut moment[local.clone()])?;
            }
        }
    }
    Ok(loaded)
}

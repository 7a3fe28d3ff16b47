//! State in and out: of each bucket, the share this rank owns, in Hugging Face coordinates.

use drivetrain_core::{
    Error, ErrorKind, Result,
    checkpoint::{StatePiece, StateReader, StateSlot, StateWriter},
};

use crate::{
    data_parallel::DataParallel,
    optimizer::Optimizer,
    weights::{Buffers, Layout},
};

/// Name of the blob that holds the number of committed steps.
const STEP: &str = "step";

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
    writer.blob(STEP, optimizer.step.into())
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
/// `Checkpoint` if a tensor is missing or has another shape; the reader's.
pub(crate) fn load(
    layout: &Layout,
    data: &DataParallel,
    reader: &dyn StateReader,
) -> Result<Loaded> {
    for spec in layout.parameters() {
        for slot in [StateSlot::Weight, StateSlot::ExpAvg, StateSlot::ExpAvgSq] {
            check_shape(&spec.name, &spec.shape, slot, reader)?;
        }
    }
    let step = reader
        .blob(STEP)
        .and_then(serde_json::Value::as_u64)
        .ok_or_else(|| {
            Error::new(
                ErrorKind::Checkpoint,
                "load_state",
                "the number of steps is missing",
            )
            .with("blob", STEP)
        })?;
    let mut loaded = Loaded {
        params: Buffers::zeros(layout),
        moments: Optimizer::zero_moments(data),
        step,
    };
    for (bucket, places) in layout.buckets().iter().enumerate() {
        for piece in places.pieces(0..places.len()) {
            let name = &layout.parameters()[piece.parameter].name;
            let values = reader.read(name, StateSlot::Weight, &piece.runs)?;
            fill(
                &mut loaded.params.bucket_mut(bucket)[piece.range],
                &values,
                name,
            )?;
        }
        let own = data.own(bucket);
        for piece in places.pieces(own.clone()) {
            let name = &layout.parameters()[piece.parameter].name;
            let local = piece.range.start - own.start..piece.range.end - own.start;
            for (slot, moment) in [StateSlot::ExpAvg, StateSlot::ExpAvgSq]
                .into_iter()
                .zip(&mut loaded.moments[bucket])
            {
                let values = reader.read(name, slot, &piece.runs)?;
                fill(&mut moment[local.clone()], &values, name)?;
            }
        }
    }
    Ok(loaded)
}

fn fill(target: &mut [f32], values: &[f32], name: &str) -> Result<()> {
    if target.len() != values.len() {
        return Err(Error::new(
            ErrorKind::Checkpoint,
            "load_state",
            "the reader gave another number of elements than was asked for",
        )
        .with("tensor", name)
        .with("expected", target.len())
        .with("found", values.len()));
    }
    target.copy_from_slice(values);
    Ok(())
}

fn check_shape(
    name: &str,
    expected: &[usize],
    slot: StateSlot,
    reader: &dyn StateReader,
) -> Result<()> {
    let found = reader.shape(name, slot);
    if found.as_deref() == Some(expected) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Checkpoint,
        "load_state",
        "the checkpoint is of another model",
    )
    .with("tensor", name)
    .with("slot", format!("{slot:?}"))
    .with("expected", format!("{expected:?}"))
    .with(
        "found",
        found.map_or("nothing".to_owned(), |shape| format!("{shape:?}")),
    )
    .help("resume with the config and the model that the checkpoint was saved with"))
}

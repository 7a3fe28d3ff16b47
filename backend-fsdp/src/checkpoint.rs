//! State in and out: each rank's rows of every parameter and its moments.

use drivetrain_core::{
    Error, ErrorKind, Result,
    checkpoint::{StatePiece, StateReader, StateSlot, StateWriter},
};
use tch::Tensor;

use crate::{
    error::torch,
    host::{floats, floats_mut},
    sharding::Unit,
};

/// Name of the blob that holds the number of committed steps.
const STEP: &str = "step";

const SLOTS: [StateSlot; 3] = [StateSlot::Weight, StateSlot::ExpAvg, StateSlot::ExpAvgSq];

/// Writes this rank's pieces, unless a replica of it does, and the step.
pub(crate) fn save(
    units: &[Unit],
    step: u64,
    speaks: bool,
    writer: &mut dyn StateWriter,
) -> Result<()> {
    for unit in units.iter().filter(|_| speaks) {
        for (parameter, spec) in unit.layout.specs().iter().enumerate() {
            let elements = unit.layout.elements(unit.rank, parameter);
            if elements.is_empty() {
                continue;
            }
            for slot in SLOTS {
                let part = unit.part(tensor(unit, slot), parameter);
                let part = part.map_err(torch("save_state"))?;
                writer.piece(StatePiece {
                    name: &spec.name,
                    slot,
                    shape: &spec.shape,
                    runs: vec![elements.clone()],
                    data: floats(&part).map_err(torch("save_state"))?.into(),
                })?;
            }
        }
    }
    writer.blob(STEP, step.into())
}

/// Reads a state that any engine in any layout saved into the units; returns the step.
pub(crate) fn load(units: &mut [Unit], reader: &dyn StateReader) -> Result<u64> {
    for unit in units.iter() {
        for spec in unit.layout.specs() {
            for slot in SLOTS {
                check_shape(&spec.name, &spec.shape, slot, reader)?;
            }
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
    for unit in units {
        for parameter in 0..unit.layout.specs().len() {
            let elements = unit.layout.elements(unit.rank, parameter);
            if elements.is_empty() {
                continue;
            }
            for slot in SLOTS {
                let name = &unit.layout.specs()[parameter].name;
                let values = reader.read(name, slot, std::slice::from_ref(&elements))?;
                let part = unit.part(tensor(unit, slot), parameter);
                fill(&mut part.map_err(torch("load_state"))?, &values, name)?;
            }
        }
        unit.gradient = None;
    }
    Ok(step)
}

fn tensor(unit: &Unit, slot: StateSlot) -> &Tensor {
    match slot {
        StateSlot::Weight => &unit.weight,
        StateSlot::ExpAvg => &unit.exp_avg,
        StateSlot::ExpAvgSq => &unit.exp_avg_sq,
    }
}

fn fill(part: &mut Tensor, values: &[f32], name: &str) -> Result<()> {
    let target = floats_mut(part).map_err(torch("load_state"))?;
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

//! What every engine's state has in common, so that any engine reads any other's.

use std::ops::Range;

use super::{StateReader, StateSlot, StateWriter};
use crate::{Error, ErrorKind, Result, model::ParameterSpec};

/// Name of the blob that holds the number of committed steps.
const STEP: &str = "step";

/// Writes the number of committed steps.
///
/// # Errors
/// The writer's.
pub fn write_step(writer: &mut dyn StateWriter, step: u64) -> Result<()> {
    writer.blob(STEP, step.into())
}

/// Reads the number of committed steps.
///
/// # Errors
/// `Checkpoint` if it is not there.
pub fn read_step(reader: &dyn StateReader) -> Result<u64> {
    let step = reader.blob(STEP).and_then(serde_json::Value::as_u64);
    step.ok_or_else(|| fault("the number of steps is missing").with("blob", STEP))
}

/// Holds a checkpoint against a model: every slot of every parameter, and the step.
///
/// # Errors
/// `Checkpoint` naming what is missing or has another shape.
pub fn check_state(reader: &dyn StateReader, parameters: &[ParameterSpec]) -> Result<()> {
    for spec in parameters {
        for slot in StateSlot::ALL {
            let found = reader.shape(&spec.name, slot);
            if found.as_ref() != Some(&spec.shape) {
                let found = found.map_or("nothing".to_owned(), |shape| format!("{shape:?}"));
                return Err(fault("the checkpoint is of another model")
                    .with("tensor", &spec.name)
                    .with("slot", format!("{slot:?}"))
                    .with("expected", format!("{:?}", spec.shape))
                    .with("found", found)
                    .help("resume with the config and the model that it was saved with"));
            }
        }
    }
    read_step(reader).map(drop)
}

/// Reads these runs of a saved tensor into `target`.
///
/// # Errors
/// The reader's; `Checkpoint` if it gives another number of elements.
pub fn read_into(
    reader: &dyn StateReader,
    name: &str,
    slot: StateSlot,
    runs: &[Range<usize>],
    target: &mut [f32],
) -> Result<()> {
    let values = reader.read(name, slot, runs)?;
    if target.len() != values.len() {
        let message = "the reader gave another number of elements than was asked for";
        return Err(fault(message)
            .with("tensor", name)
            .with("expected", target.len())
            .with("found", values.len()));
    }
    target.copy_from_slice(&values);
    Ok(())
}

fn fault(message: &str) -> Error {
    Error::new(ErrorKind::Checkpoint, "load_state", message)
}

//! State in and out: each rank's rows of every parameter and its moments.

use drivetrain_core::{
    Result,
    checkpoint::{
        StatePiece, StateReader, StateSlot, StateWriter, read_into, read_step, write_step,
    },
};
use tch::{Device, Tensor};

use crate::{
    error::torch,
    host::{floats, floats_mut},
    sharding::Unit,
};

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
            for slot in StateSlot::ALL {
                let part = unit.part(tensor(unit, slot), parameter);
                let part = part
                    .and_then(|part| part.f_to_device(Device::Cpu))
                    .map_err(torch("save_state"))?;
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
    write_step(writer, step)
}

/// Reads a state that any engine in any layout saved into the units; returns the step.
pub(crate) fn load(units: &mut [Unit], reader: &dyn StateReader) -> Result<u64> {
    let step = read_step(reader)?;
    for unit in units {
        // Another rank may still be reading these weights.
        unit.weight = unit.weight.f_zeros_like().map_err(torch("load_state"))?;
        for parameter in 0..unit.layout.specs().len() {
            let elements = unit.layout.elements(unit.rank, parameter);
            if elements.is_empty() {
                continue;
            }
            for slot in StateSlot::ALL {
                let name = &unit.layout.specs()[parameter].name;
                let mut part = unit
                    .part(tensor(unit, slot), parameter)
                    .map_err(torch("load_state"))?;
                // The same memory, where it is the host's.
                let mut read = part.f_to_device(Device::Cpu).map_err(torch("load_state"))?;
                let target = floats_mut(&mut read).map_err(torch("load_state"))?;
                read_into(reader, name, slot, std::slice::from_ref(&elements), target)?;
                if part.device() != Device::Cpu {
                    part.f_copy_(&read).map_err(torch("load_state"))?;
                }
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

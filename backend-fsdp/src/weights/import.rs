//! A rank's shards from a source.

use drivetrain_core::{
    Result,
    weights::{WeightSource, read_into},
};
use tch::{Device, Kind, Tensor};

use crate::{error::torch, host::floats_mut, sharding::Unit};

/// This rank's shard of each unit, read from a source.
///
/// # Errors
/// The source's; `File` if it gives another number of elements.
pub(crate) fn read(units: &[Unit], source: &dyn WeightSource) -> Result<Vec<Tensor>> {
    units.iter().map(|unit| read_unit(unit, source)).collect()
}

fn read_unit(unit: &Unit, source: &dyn WeightSource) -> Result<Tensor> {
    let mut shard = Tensor::f_zeros([unit.len() as i64], (Kind::Float, Device::Cpu))
        .map_err(torch("import_weights"))?;
    let flat = floats_mut(&mut shard).map_err(torch("import_weights"))?;
    for (parameter, spec) in unit.layout.specs().iter().enumerate() {
        let target = &mut flat[unit.layout.shard(unit.rank, parameter)];
        let rows = unit.layout.rows(unit.rank, parameter);
        if rows.is_empty() {
            continue;
        }
        let width: usize = spec.shape.iter().skip(1).product();
        let run = rows.start * width..rows.end * width;
        read_into(source, &spec.name, std::slice::from_ref(&run), target)?;
    }
    let home = unit.weight.device();
    shard.f_to_device(home).map_err(torch("import_weights"))
}

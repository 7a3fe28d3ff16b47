//! A rank's shards from a source.

use drivetrain_core::{Error, ErrorKind, Result, weights::WeightSource};
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
        let values = source.read_rows(&spec.name, rows)?;
        if values.len() != target.len() {
            return Err(Error::new(
                ErrorKind::File,
                "import_weights",
                "the source gave another number of elements than was asked for",
            )
            .with("tensor", &spec.name)
            .with("expected", target.len())
            .with("found", values.len()));
        }
        target.copy_from_slice(&values);
    }
    Ok(shard)
}

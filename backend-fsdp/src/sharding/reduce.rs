//! Sums of gradients over ranks, which may be under way while other gradients are computed.

use std::sync::Arc;

use drivetrain_core::{
    Result,
    communicator::{Input, ReduceOp, Shared, Work},
};
use tch::{Device, Kind, Tensor};

use super::{
    ShardGroup, Unit, UnitLayout,
    unit::{empty, zeros},
};
use crate::{
    error::{Torch, torch},
    host::{SharedTensor, output},
};

const OPERATION: &str = "reduce_gradient";

/// A unit's gradient on its way to its shards.
#[derive(Debug)]
pub(crate) struct Reducing {
    /// Before what it writes: fields are dropped in order, and a transport that still writes waits in the drop.
    work: Option<Work<'static>>,
    sum: Tensor,
}

impl ShardGroup {
    /// Adds one micro-batch's gradients of a whole unit to those that are not reduced yet, in f32.
    pub(crate) fn accumulate(&self, unit: &mut Unit, gradients: Vec<Tensor>) -> Result<()> {
        let add = || -> Torch<()> {
            let mut sum = match unit.unsharded.take() {
                Some(sum) => sum,
                None => zeros(unit.layout.full_len(), self.device)?,
            };
            place(&unit.layout, gradients, &mut sum, true)?;
            unit.unsharded = Some(sum);
            Ok(())
        };
        add().map_err(torch(OPERATION))
    }

    /// Starts to add the ranks' gradients of a whole unit, one tensor a parameter in the layout's order, and what was
    /// accumulated of it. `None` is all 0, and takes part all the same. Collective.
    pub(crate) fn start_reduce(
        &self,
        unit: &mut Unit,
        gradients: Option<Vec<Tensor>>,
    ) -> Result<Reducing> {
        let packed = self.pack(unit, gradients).map_err(torch(OPERATION))?;
        if self.num_ranks() == 1 {
            return Ok(Reducing {
                work: None,
                sum: packed,
            });
        }
        let counts = unit.layout.shard_lens();
        // SAFETY: it was packed for this, and nobody else has it.
        let packed = unsafe { SharedTensor::new(packed) }.map_err(torch(OPERATION))?;
        let packed = Input::Shared(Shared::new(Arc::new(packed)));
        let sum = empty(counts[self.rank()], self.dtypes.reduce, Device::Cpu);
        let mut sum = sum.map_err(torch(OPERATION))?;
        // SAFETY: the sum is held beside the operation, dropped after it, and touched when it was waited for.
        let target = unsafe { output(&mut sum) }.map_err(torch(OPERATION))?;
        let work = (self.shard).reduce_scatter(packed, target, &counts, ReduceOp::Sum)?;
        Ok(Reducing {
            work: Some(work),
            sum,
        })
    }

    /// Waits for it, sums over replicas, and adds to the unit's sharded gradient. Collective over replicas.
    pub(crate) fn finish_reduce(&self, unit: &mut Unit, reducing: Reducing) -> Result<()> {
        let Reducing { work, mut sum } = reducing;
        if let Some(work) = work {
            work.wait()?;
        }
        if let Some(replicate) = &self.replicate {
            // SAFETY: it is waited for before the sum is touched.
            let target = unsafe { output(&mut sum) }.map_err(torch(OPERATION))?;
            replicate.all_reduce(target, ReduceOp::Sum)?.wait()?;
        }
        let mut add = || -> Torch<()> {
            let sum = sum.f_to_device(unit.weight.device())?;
            match &mut unit.gradient {
                Some(gradient) => gradient.f_add_(&sum).map(drop)?,
                none => *none = Some(sum.f_to_kind(Kind::Float)?),
            }
            Ok(())
        };
        add().map_err(torch(OPERATION))
    }

    /// Rank after rank, each rank's parts of all parameters, in the dtype of the reduction and in host memory.
    fn pack(&self, unit: &mut Unit, gradients: Option<Vec<Tensor>>) -> Torch<Tensor> {
        let (layout, kind) = (&unit.layout, self.dtypes.reduce);
        let packed = match (unit.unsharded.take(), gradients) {
            (Some(mut sum), Some(gradients)) => {
                place(layout, gradients, &mut sum, true)?;
                sum
            }
            (Some(sum), None) => sum,
            (None, Some(gradients)) => {
                let mut packed = empty(layout.full_len(), kind, self.device)?;
                place(layout, gradients, &mut packed, false)?;
                packed
            }
            (None, None) => zeros(layout.full_len(), self.device)?,
        };
        packed.f_to_kind(kind)?.f_to_device(Device::Cpu)
    }
}

/// Writes each parameter's gradient to where its parts lie in the packed ones, or adds it; each is dropped when it is
/// done with.
fn place(layout: &UnitLayout, gradients: Vec<Tensor>, packed: &mut Tensor, add: bool) -> Torch<()> {
    for (parameter, gradient) in gradients.into_iter().enumerate() {
        let mut base = 0;
        for rank in 0..layout.num_ranks() {
            let (rows, own) = (layout.rows(rank, parameter), layout.shard(rank, parameter));
            let at = base + own.start;
            base += layout.shard_len(rank);
            if own.is_empty() {
                continue;
            }
            let part = gradient.f_narrow(0, rows.start as i64, rows.len() as i64)?;
            let target = packed.f_narrow(0, at as i64, own.len() as i64)?;
            let mut target = target.f_view(part.size().as_slice())?;
            match add {
                true => target.f_add_(&part).map(drop)?,
                false => target.f_copy_(&part)?,
            }
        }
    }
    Ok(())
}

//! The collectives: all-gather of a unit, reduce-scatter of its gradient.

use std::sync::Arc;

use drivetrain_core::{
    Result,
    communicator::{Communicator, ReduceOp},
    mesh::{DeviceMesh, MeshAxis},
};
use tch::Tensor;

use super::{
    Unit, UnitLayout,
    gathered::{Gathered, Residents},
    unit::{empty, zeros},
};
use crate::{
    error::{Torch, torch},
    host::{floats, floats_mut},
};

/// The ranks among which parameters are sharded, and the replicas of each shard.
#[derive(Debug)]
pub(crate) struct ShardGroup {
    shard: Arc<dyn Communicator>,
    replicate: Option<Arc<dyn Communicator>>,
    residents: Arc<Residents>,
}

impl ShardGroup {
    /// Splits the world as the mesh says. Collective.
    pub(crate) fn new(world: &Arc<dyn Communicator>, mesh: &DeviceMesh) -> Result<Self> {
        let subgroup = |axis: MeshAxis| {
            let ranks = mesh.group(world.rank(), &[axis])?;
            world.subgroup(&ranks, axis.name())
        };
        Ok(Self {
            shard: subgroup(MeshAxis::DataShard)?,
            replicate: match mesh.data_replicate {
                0 | 1 => None,
                _ => Some(subgroup(MeshAxis::DataReplicate)?),
            },
            residents: Arc::default(),
        })
    }

    /// The group over which parameters are sharded.
    pub(crate) fn communicator(&self) -> &dyn Communicator {
        &*self.shard
    }

    /// Number of shards.
    pub(crate) fn num_ranks(&self) -> usize {
        self.shard.world_size()
    }

    /// Which shard is this rank's.
    pub(crate) fn rank(&self) -> usize {
        self.shard.rank()
    }

    /// Whether this rank speaks for its replicas.
    pub(crate) fn is_first_replica(&self) -> bool {
        self.replicate.as_ref().is_none_or(|r| r.rank() == 0)
    }

    /// Counts gathered units.
    #[cfg(test)]
    pub(crate) fn residents(&self) -> &Residents {
        &self.residents
    }

    /// Makes a unit whole from shards like `shard` (the policy's or a snapshot's). Collective.
    pub(crate) fn gather(&self, layout: &UnitLayout, shard: &Tensor) -> Result<Gathered> {
        if self.num_ranks() == 1 {
            return Gathered::alias(shard, layout).map_err(torch("gather_unit"));
        }
        let mut flat = empty(layout.full_len()).map_err(torch("gather_unit"))?;
        self.fill(layout, shard, &mut flat)?;
        Gathered::owned(flat, layout, &self.residents).map_err(torch("gather_unit"))
    }

    /// Makes a freed unit whole again, in the same tensors. Collective.
    pub(crate) fn gather_again(
        &self,
        layout: &UnitLayout,
        shard: &Tensor,
        gathered: &mut Gathered,
    ) -> Result<()> {
        if gathered.allocate().map_err(torch("gather_unit"))? {
            self.fill(layout, shard, &mut gathered.flat)?;
        }
        Ok(())
    }

    fn fill(&self, layout: &UnitLayout, shard: &Tensor, flat: &mut Tensor) -> Result<()> {
        let counts = layout.shard_lens();
        let total = counts.iter().sum();
        let mut ranks = empty(total).map_err(torch("gather_unit"))?;
        let ranks = floats_mut(&mut ranks).map_err(torch("gather_unit"))?;
        let shard = floats(shard).map_err(torch("gather_unit"))?;
        self.shard
            .all_gather(shard.into(), (&mut *ranks).into(), &counts)?
            .wait()?;
        let flat = floats_mut(flat).map_err(torch("gather_unit"))?;
        for_each_part(layout, |full, among_ranks| {
            flat[full].copy_from_slice(&ranks[among_ranks]);
        });
        Ok(())
    }

    /// Adds the ranks' gradients of a whole unit, one tensor a parameter in the layout's order, into the unit's
    /// sharded gradient. `None` is all 0, and takes part all the same. Collective.
    pub(crate) fn reduce(&self, unit: &mut Unit, gradients: Option<Vec<Tensor>>) -> Result<()> {
        let mut summed = match (self.num_ranks(), gradients) {
            (1, Some(gradients)) => flatten(&gradients).map_err(torch("reduce_gradient"))?,
            (1, None) => zeros(unit.len()).map_err(torch("reduce_gradient"))?,
            (_, gradients) => self.reduce_scatter(&unit.layout, gradients)?,
        };
        if let Some(replicate) = &self.replicate {
            let summed = floats_mut(&mut summed).map_err(torch("reduce_gradient"))?;
            replicate.all_reduce(summed.into(), ReduceOp::Sum)?.wait()?;
        }
        match &mut unit.gradient {
            Some(gradient) => {
                let _ = gradient.f_add_(&summed).map_err(torch("reduce_gradient"))?;
            }
            none => *none = Some(summed),
        }
        Ok(())
    }

    fn reduce_scatter(
        &self,
        layout: &UnitLayout,
        gradients: Option<Vec<Tensor>>,
    ) -> Result<Tensor> {
        let counts = layout.shard_lens();
        let total = counts.iter().sum();
        let packed = match gradients {
            Some(gradients) => pack(layout, gradients)?,
            None => zeros(total).map_err(torch("reduce_gradient"))?,
        };
        let mut shard = empty(counts[self.rank()]).map_err(torch("reduce_gradient"))?;
        let packed = floats(&packed).map_err(torch("reduce_gradient"))?;
        let target = floats_mut(&mut shard).map_err(torch("reduce_gradient"))?;
        self.shard
            .reduce_scatter(packed.into(), target.into(), &counts, ReduceOp::Sum)?
            .wait()?;
        Ok(shard)
    }
}

fn flatten(gradients: &[Tensor]) -> Torch<Tensor> {
    let flat = gradients.iter().map(|g| g.f_flatten(0, -1));
    Tensor::f_cat(&flat.collect::<Torch<Vec<_>>>()?, 0)
}

/// Rank after rank, each rank's parts of all parameters.
fn pack(layout: &UnitLayout, gradients: Vec<Tensor>) -> Result<Tensor> {
    let mut packed = empty(layout.full_len()).map_err(torch("reduce_gradient"))?;
    let target = floats_mut(&mut packed).map_err(torch("reduce_gradient"))?;
    let mut at = 0;
    let contiguous: Vec<_> = gradients
        .iter()
        .map(Tensor::f_contiguous)
        .collect::<Torch<_>>()
        .map_err(torch("reduce_gradient"))?;
    for rank in 0..layout.num_ranks() {
        for (parameter, gradient) in contiguous.iter().enumerate() {
            let source = floats(gradient).map_err(torch("reduce_gradient"))?;
            let part = &source[layout.elements(rank, parameter)];
            target[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
    }
    Ok(packed)
}

/// Calls with each part's place in the whole unit and among the shards end to end.
fn for_each_part(
    layout: &UnitLayout,
    mut each: impl FnMut(std::ops::Range<usize>, std::ops::Range<usize>),
) {
    let mut base = 0;
    for rank in 0..layout.num_ranks() {
        for parameter in 0..layout.specs().len() {
            let start = layout.full(parameter).start;
            let elements = layout.elements(rank, parameter);
            let shard = layout.shard(rank, parameter);
            each(
                start + elements.start..start + elements.end,
                base + shard.start..base + shard.end,
            );
        }
        base += layout.shard_len(rank);
    }
}

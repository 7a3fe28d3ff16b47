//! All-gather of a unit, which may be under way while another one is computed.

use std::{ops::Range, sync::Arc};

use drivetrain_core::{
    Error, ErrorKind, Result,
    communicator::{Communicator, Shared, Work},
};
use tch::{Device, Tensor};

use super::{
    ShardGroup, UnitLayout,
    gathered::{Gathered, Memory, Resident},
    unit::empty,
};
use crate::{
    error::{Torch, torch},
    host::{SharedTensor, bytes_mut},
    options::AfterForward,
};

const OPERATION: &str = "gather_unit";

/// A unit on its way to being whole. It counts as gathered.
#[derive(Debug)]
pub(crate) struct Gathering {
    source: Source,
    resident: Option<Resident>,
}

#[derive(Debug)]
enum Source {
    /// It is whole already.
    None,
    /// One rank's shard is all of it.
    Shard(Tensor),
    /// Every rank's shard.
    Shards(Work<'static, Vec<Shared>>),
    /// Every part that a group kept after forward.
    Parts(Work<'static, Vec<Shared>>),
}

impl ShardGroup {
    /// Starts to make a unit whole from shards like `shard` (the policy's or a snapshot's). Collective.
    pub(crate) fn start_gather(&self, layout: &UnitLayout, shard: &Tensor) -> Result<Gathering> {
        let alone = self.num_ranks() == 1;
        let device = if alone { self.device } else { Device::Cpu };
        let cast = shard.f_to_kind(self.dtypes.compute);
        let cast = cast
            .and_then(|cast| cast.f_to_device(device))
            .map_err(torch(OPERATION))?;
        // The shard itself is what is computed with: no memory is taken.
        let alias = alone && cast.data_ptr() == shard.data_ptr();
        Ok(Gathering {
            resident: (!alias).then(|| self.resident(layout)),
            source: match alone {
                true => Source::Shard(cast),
                false => Source::Shards(share(&*self.shard, cast, &layout.shard_lens())?),
            },
        })
    }

    /// Waits for it.
    pub(crate) fn finish_gather(
        &self,
        layout: &UnitLayout,
        gathering: Gathering,
    ) -> Result<Gathered> {
        let Gathering { source, resident } = gathering;
        let memory = resident.map_or(Memory::Shard, Memory::Own);
        if let Source::Shard(shard) = source {
            return Gathered::new(shard, layout, memory).map_err(torch(OPERATION));
        }
        let flat = empty(layout.full_len(), self.dtypes.compute, self.device);
        let gathered = flat.and_then(|flat| Gathered::new(flat, layout, memory));
        let mut gathered = gathered.map_err(torch(OPERATION))?;
        self.fill(layout, source, &mut gathered.flat)?;
        Ok(gathered)
    }

    /// What becomes of a unit between its forward and its backward.
    pub(crate) fn reshard(&self, gathered: &mut Gathered) -> Result<()> {
        match (self.after_forward, &self.post_forward) {
            (AfterForward::Keep, _) => return Ok(()),
            (AfterForward::Group(_), Some(group)) => {
                let range = part(gathered.flat.numel(), &**group, group.rank());
                let kept = gathered
                    .flat
                    .f_narrow(0, range.start as i64, range.len() as i64)
                    .and_then(|part| part.f_detach_copy())
                    .and_then(|part| part.f_to_device(Device::Cpu));
                gathered.part = Some(kept.map_err(torch("free_unit"))?);
            }
            _ => {}
        }
        gathered.free()
    }

    /// Starts to make a unit whole again. Collective.
    pub(crate) fn start_gather_again(
        &self,
        layout: &UnitLayout,
        shard: &Tensor,
        gathered: &mut Gathered,
    ) -> Result<Gathering> {
        if !matches!(gathered.memory, Memory::Freed) {
            return Ok(Gathering {
                source: Source::None,
                resident: None,
            });
        }
        let (Some(part_of_rank), Some(group)) = (gathered.part.take(), &self.post_forward) else {
            return self.start_gather(layout, shard);
        };
        let counts: Vec<_> = (0..group.world_size())
            .map(|rank| part(layout.full_len(), &**group, rank).len())
            .collect();
        Ok(Gathering {
            resident: Some(self.resident(layout)),
            source: Source::Parts(share(&**group, part_of_rank, &counts)?),
        })
    }

    /// Waits for it; the unit is whole again in the same tensors.
    pub(crate) fn finish_gather_again(
        &self,
        layout: &UnitLayout,
        gathering: Gathering,
        gathered: &mut Gathered,
    ) -> Result<()> {
        if let Some(resident) = gathering.resident {
            gathered.allocate(resident).map_err(torch(OPERATION))?;
            self.fill(layout, gathering.source, &mut gathered.flat)?;
        }
        Ok(())
    }

    /// Writes what was gathered into a unit's memory, and moves no version counter: autograd does not take it for a
    /// change.
    fn fill(&self, layout: &UnitLayout, source: Source, flat: &mut Tensor) -> Result<()> {
        if let Source::Shard(shard) = &source {
            let filled = flat.f_data().and_then(|mut data| data.f_copy_(shard));
            return filled.map_err(torch(OPERATION));
        }
        let size = self.dtypes.compute.elt_size_in_bytes();
        let bytes = |range: Range<usize>| range.start * size..range.end * size;
        let mut staged = match self.device {
            Device::Cpu => None,
            _ => Some(
                empty(layout.full_len(), self.dtypes.compute, Device::Cpu)
                    .map_err(torch(OPERATION))?,
            ),
        };
        let target = bytes_mut(staged.as_mut().unwrap_or(flat)).map_err(torch(OPERATION))?;
        match source {
            Source::None | Source::Shard(_) => {}
            Source::Shards(work) => {
                for (rank, shard) in work.wait()?.into_iter().enumerate() {
                    let shard = host_bytes(&shard)?;
                    for parameter in 0..layout.specs().len() {
                        let start = layout.full(parameter).start;
                        let elements = layout.elements(rank, parameter);
                        let full = start + elements.start..start + elements.end;
                        let own = layout.shard(rank, parameter);
                        target[bytes(full)].copy_from_slice(&shard[bytes(own)]);
                    }
                }
            }
            Source::Parts(work) => {
                let mut at = 0;
                for part in work.wait()? {
                    let part = host_bytes(&part)?;
                    target[at..at + part.len()].copy_from_slice(part);
                    at += part.len();
                }
            }
        }
        if let Some(staged) = staged {
            let filled = flat.f_data().and_then(|mut data| data.f_copy_(&staged));
            filled.map_err(torch(OPERATION))?;
        }
        Ok(())
    }

    fn resident(&self, layout: &UnitLayout) -> Resident {
        let bytes = layout.full_len() * self.dtypes.compute.elt_size_in_bytes();
        Resident::new(&self.residents, bytes)
    }
}

/// The elements of a whole unit that a rank of a group keeps after forward: the last ones may keep fewer, or none.
fn part(len: usize, group: &dyn Communicator, rank: usize) -> Range<usize> {
    super::layout::shard_rows(len, group.world_size(), rank)
}

/// Starts an all-gather of a tensor that nobody writes before the next step's commit point.
fn share(
    group: &dyn Communicator,
    tensor: Tensor,
    counts: &[usize],
) -> Result<Work<'static, Vec<Shared>>> {
    // SAFETY: a shard is written by the optimizer alone, after an all-reduce that each rank enters when its passes over
    // the model are over; what else changes weights puts other tensors in their place. A part is written once.
    let shared: Torch<_> = unsafe { SharedTensor::new(tensor) };
    let shared = Shared::new(Arc::new(shared.map_err(torch(OPERATION))?));
    group.all_gather_shared(shared, counts)
}

fn host_bytes(shared: &Shared) -> Result<&[u8]> {
    shared.as_view().host_bytes().ok_or_else(|| {
        Error::new(
            ErrorKind::Defect,
            OPERATION,
            "what was gathered is not in host memory",
        )
    })
}

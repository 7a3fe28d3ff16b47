//! Ranks that talk by NCCL. **It has never run**: there was no GPU; what is around it is tested over a library that is
//! none (`drivetrain-collectives`).

use std::{sync::Arc, time::Duration};

use drivetrain_collectives::{Collective, Group, GroupId, Offloaded, Open};
use drivetrain_core::{Error, ErrorKind, Result, communicator::Communicator};
use drivetrain_kernels::cuda::{CudaError, Gpu, NcclGroup};

/// A world whose f32 collectives run on the ranks' devices. Collective over `world`.
///
/// # Errors
/// `Device` where ranks have no device each, or libnccl is missing, on every rank; the communicator's.
pub(crate) fn over(world: Arc<dyn Communicator>) -> Result<Arc<dyn Communicator>> {
    let (ordinal, ranks) = (world.rank(), world.world_size());
    let devices = Gpu::count().map_err(|cause| fault("count_devices", cause));
    let enough = devices.and_then(|devices| match devices >= ranks {
        true => Ok(()),
        false => Err(Error::new(
            ErrorKind::Device,
            "count_devices",
            "NCCL takes no two ranks on one device",
        )
        .with("ranks", ranks)
        .with("devices", devices)
        .help("take as many ranks as there are devices, or `collectives: host`")),
    });
    world.agree("count_devices", enough)?;
    let timeout = world.timeout();
    let open = Arc::new(Nccl { ordinal, timeout });
    Ok(Arc::new(Offloaded::new(world, open)?))
}

/// On the device of this rank.
#[derive(Debug)]
struct Nccl {
    ordinal: usize,
    timeout: Duration,
}

#[derive(Debug)]
struct Member(NcclGroup);

impl Open for Nccl {
    fn id(&self) -> Result<GroupId> {
        NcclGroup::id().map_err(|cause| fault("make_group", cause))
    }

    fn join(&self, id: &GroupId, rank: usize, size: usize) -> Result<Arc<dyn Group>> {
        let joined = NcclGroup::join(self.ordinal, id, (rank, size), self.timeout);
        match joined {
            Ok(group) => Ok(Arc::new(Member(group))),
            Err(cause) => Err(fault("join_group", cause)),
        }
    }
}

impl Group for Member {
    fn run(&self, collective: &Collective, input: &[f32]) -> Result<Vec<f32>> {
        let output = match collective {
            Collective::AllReduce => self.0.all_reduce(input),
            Collective::AllGather { counts } => self.0.all_gather(input, counts),
            Collective::ReduceScatter { counts } => self.0.reduce_scatter(input, counts),
            Collective::Broadcast { root } => self.0.broadcast(input, *root),
            Collective::AllToAll {
                send_counts,
                receive_counts,
            } => self.0.all_to_all(input, send_counts, receive_counts),
        };
        output.map_err(|cause| fault(collective.name(), cause))
    }

    fn abort(&self) {
        self.0.abort();
    }
}

fn fault(operation: &'static str, cause: CudaError) -> Error {
    Error::new(ErrorKind::Device, operation, "NCCL failed")
        .with("device", "cuda")
        .help("let ranks talk through the host: `collectives: host`")
        .caused_by(cause)
}

//! Who shards with whom, and in what dtypes.

use std::sync::Arc;

use drivetrain_core::{
    DType, Error, ErrorKind, Result,
    communicator::Communicator,
    config::PrecisionConfig,
    mesh::{DeviceMesh, MeshAxis},
};
use tch::{Device, Kind};

use super::gathered::Residents;
use crate::options::{AfterForward, Options};

/// The ranks among which parameters are sharded, and the replicas of each shard.
#[derive(Debug)]
pub(crate) struct ShardGroup {
    pub(super) shard: Arc<dyn Communicator>,
    pub(super) replicate: Option<Arc<dyn Communicator>>,
    /// Those among which a block is cut after its forward pass, where they are fewer.
    pub(super) post_forward: Option<Arc<dyn Communicator>>,
    pub(super) after_forward: AfterForward,
    pub(super) dtypes: Dtypes,
    pub(super) device: Device,
    /// Where shards lie.
    home: Device,
    pub(super) residents: Arc<Residents>,
}

/// What is gathered and what is reduced, beside f32 masters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Dtypes {
    /// Of gathered parameters, and of activations.
    pub(crate) compute: Kind,
    /// Of gradients while they are reduced.
    pub(crate) reduce: Kind,
}

impl Dtypes {
    /// As the job says.
    pub(crate) fn new(precision: &PrecisionConfig) -> Self {
        let kind = |dtype: DType| match dtype {
            DType::Bf16 => Kind::BFloat16,
            _ => Kind::Float,
        };
        Self {
            compute: kind(precision.compute),
            reduce: kind(precision.reduce),
        }
    }
}

impl ShardGroup {
    /// Splits the world as the mesh says. Collective.
    pub(crate) fn new(
        world: &Arc<dyn Communicator>,
        mesh: &DeviceMesh,
        dtypes: Dtypes,
        options: Options,
        device: Device,
    ) -> Result<Self> {
        let subgroup = |axis: MeshAxis| {
            let ranks = mesh.group(world.rank(), &[axis])?;
            world.subgroup(&ranks, axis.name())
        };
        let shard = subgroup(MeshAxis::DataShard)?;
        let after_forward = options.reshard_after_forward.over(shard.world_size());
        let after_forward = after_forward.ok_or_else(|| {
            Error::new(
                ErrorKind::Config,
                "build_engine",
                "the number of backends.fsdp.reshard_after_forward does not divide the ranks of a shard group",
            )
            .with("ranks", shard.world_size())
        })?;
        let post_forward = match after_forward {
            AfterForward::Group(n) => {
                let first = shard.rank() / n * n;
                let ranks: Vec<_> = (first..first + n).collect();
                Some(shard.subgroup(&ranks, "post_forward")?)
            }
            AfterForward::Keep | AfterForward::Free => None,
        };
        Ok(Self {
            shard,
            replicate: match mesh.data_replicate {
                0 | 1 => None,
                _ => Some(subgroup(MeshAxis::DataReplicate)?),
            },
            post_forward,
            after_forward,
            dtypes,
            home: match options.cpu_offload {
                true => Device::Cpu,
                false => device,
            },
            device,
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

    /// Where gathered parameters lie, and what is computed is.
    pub(crate) fn device(&self) -> Device {
        self.device
    }

    /// Where shards, their gradients and moments lie.
    pub(crate) fn home(&self) -> Device {
        self.home
    }

    /// Counts gathered units.
    pub(crate) fn residents(&self) -> &Residents {
        &self.residents
    }
}

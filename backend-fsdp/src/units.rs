//! The model as units: the root, then the blocks.

use drivetrain_core::{Error, ErrorKind, Result, config::JobConfig, model::ModelSpec};
use tch::Tensor;

use crate::{
    model::{BlockShape, RootIndex},
    sharding::{ShardGroup, Unit, UnitLayout},
};

/// Every unit of a model on one rank.
#[derive(Debug)]
pub(crate) struct Units {
    /// Root first, then the blocks in order.
    pub(crate) all: Vec<Unit>,
    /// Where the root's parameters are.
    pub(crate) root: RootIndex,
    /// Sizes that the blocks share.
    pub(crate) shape: BlockShape,
}

impl Units {
    /// Cuts a model into units whose shards are all 0.
    pub(crate) fn new(model: &ModelSpec, config: &JobConfig, group: &ShardGroup) -> Result<Self> {
        let specs = model.parameters();
        let of = |layer: Option<usize>| {
            let chosen = specs.iter().filter(|s| s.layer == layer).cloned().collect();
            let layout = UnitLayout::new(chosen, group.num_ranks());
            Unit::zeros(layout, group.rank(), group.home())
        };
        let mut all = vec![of(None)?];
        for layer in 0..model.num_layers() {
            all.push(of(Some(layer))?);
        }
        let root = RootIndex::new(model, all[0].layout.specs()).ok_or_else(|| {
            Error::new(
                ErrorKind::Defect,
                "build_engine",
                "the model lacks an embedding, a final norm or a head",
            )
        })?;
        Ok(Self {
            all,
            root,
            shape: BlockShape::new(model, config),
        })
    }

    /// The policy's shards.
    pub(crate) fn weights(&self) -> Vec<&Tensor> {
        self.all.iter().map(|u| &u.weight).collect()
    }

    /// Drops the open step's gradients.
    pub(crate) fn drop_gradients(&mut self) {
        for unit in &mut self.all {
            unit.gradient = None;
            unit.unsharded = None;
        }
    }

    /// Whether a step is open.
    pub(crate) fn has_gradients(&self) -> bool {
        self.all.iter().any(|u| u.gradient.is_some())
    }
}

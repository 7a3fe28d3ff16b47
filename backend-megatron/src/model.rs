//! The model put together: modules, and where their weights lie.

use drivetrain_core::{
    Error, ErrorKind, Result,
    model::{LayerSpec, MlpSpec, ModelSpec},
};

use crate::{
    modules::{Block, Embedding, Head},
    weights::{Layout, LayoutBuilder},
};

/// A decoder-only transformer: embedding, blocks, head. Buckets: the embedding's, one a block, the head's.
#[derive(Debug, Clone)]
pub(crate) struct Model {
    pub(crate) embedding: Embedding,
    pub(crate) blocks: Vec<Block>,
    pub(crate) head: Head,
    pub(crate) layout: Layout,
}

impl Model {
    /// Lays out the weights and builds the modules on them.
    ///
    /// # Errors
    /// `Unsupported` for a layer with experts.
    pub(crate) fn new(spec: &ModelSpec, logits_budget_bytes: u64) -> Result<Self> {
        let mut layout = LayoutBuilder::new(spec.parameters());
        let embedding = Embedding::new(spec, &mut layout)?;
        let blocks = spec
            .layers
            .iter()
            .enumerate()
            .map(|(index, layer)| Block::new(spec, index, layer, ffn_size(layer)?, &mut layout))
            .collect::<Result<Vec<_>>>()?;
        let head = Head::new(spec, &embedding, logits_budget_bytes, &mut layout)?;
        Ok(Self {
            embedding,
            blocks,
            head,
            layout: layout.finish()?,
        })
    }
}

fn ffn_size(layer: &LayerSpec) -> Result<usize> {
    match layer.mlp {
        MlpSpec::Dense { ffn_size } => Ok(ffn_size),
        MlpSpec::Moe => Err(Error::new(
            ErrorKind::Unsupported,
            "build_model",
            "this engine has no mixture of experts",
        )),
    }
}

//! The model put together: modules, and where their weights lie.

use drivetrain_core::{
    Error, ErrorKind, Result,
    plan::{Holdings, PlannedOp, TrainPlan},
};

use crate::{
    modules::{Block, Context, Embedding, Head, RouterTally, SavedBlock},
    ranks::RankShape,
    weights::{Buffers, Layout, LayoutBuilder, Sums},
    workspace::Buffer,
};

/// What one rank has of a decoder-only transformer: chunks of neighbouring layers, one unless they are interleaved.
#[derive(Debug, Clone)]
pub(crate) struct Model {
    pub(crate) chunks: Vec<Chunk>,
    pub(crate) layout: Layout,
    /// D.
    pub(crate) width: usize,
}

/// Layers that a micro-batch passes without leaving the rank; the first of the model's chunks begins with the
/// embedding, the last ends with the head. Buckets: the embedding's, one a block, the head's.
#[derive(Debug, Clone)]
pub(crate) struct Chunk {
    pub(crate) embedding: Option<Embedding>,
    pub(crate) blocks: Vec<Block>,
    pub(crate) head: Option<Head>,
}

impl Model {
    /// Lays out the weights of a world rank and builds the modules on them.
    ///
    /// # Errors
    /// `Defect` from the layout.
    pub(crate) fn new(plan: &TrainPlan, rank: usize) -> Result<Self> {
        let (spec, shape) = (&plan.model, RankShape::new(plan, rank));
        let held = Holdings::new(spec, &plan.mesh, &plan.stages).of(rank);
        let mut layout = LayoutBuilder::new(spec.parameters(), held);
        let mut chunks: Vec<Chunk> = Vec::new();
        for chunk in shape.pipeline.chunks() {
            let last = chunk + 1 == plan.stages.len();
            // Tied, and the first and the last chunk on one rank that has nothing between them.
            let shared = spec.tied_embeddings && plan.mesh.pipeline == 1;
            let embedding = match chunk {
                0 => Some(Embedding::new(spec, shape.tensor, shared, &mut layout)?),
                _ => None,
            };
            let blocks = plan.stages[chunk]
                .clone()
                .map(|index| Block::new(spec, index, shape, &plan.config, &mut layout))
                .collect::<Result<_>>()?;
            let head = match last {
                true => {
                    let table = embedding.as_ref().filter(|_| shared).map(|e| &e.weight);
                    let budget = plan.config.logits_budget_bytes;
                    Some(Head::new(spec, table, budget, shape.tensor, &mut layout)?)
                }
                false => None,
            };
            chunks.push(Chunk {
                embedding,
                blocks,
                head,
            });
        }
        Ok(Self {
            chunks,
            layout: layout.finish()?,
            width: spec.hidden_size,
        })
    }
}

impl Chunk {
    /// What the chunk makes of its input, [S, D] both, and what backward needs. The first of the model begins with
    /// the tokens.
    ///
    /// # Errors
    /// The communicator's.
    pub(crate) fn forward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        input: Option<Buffer>,
        tally: &mut RouterTally,
    ) -> Result<(Buffer, Vec<SavedBlock>)> {
        let mut x = match (&self.embedding, input) {
            (Some(embedding), _) => embedding.forward(cx, params)?,
            (None, Some(input)) => input,
            (None, None) => return Err(missing("an activation")),
        };
        let mut saved = Vec::with_capacity(self.blocks.len());
        for block in &self.blocks {
            let (y, kept) = block.forward(cx, params, x, tally)?;
            // Where nothing is trained there is no way back.
            if cx.router.is_some() {
                saved.push(kept);
            }
            x = y;
        }
        Ok((x, saved))
    }

    /// Adds the gradients of the chunk's weights but the head's, from that of its output [S, D]: that of its input,
    /// unless it begins with the tokens. `done` is told of each bucket that is complete.
    ///
    /// # Errors
    /// The communicator's; those of `done`.
    pub(crate) fn backward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        grads: &mut Sums,
        saved: Vec<SavedBlock>,
        mut dx: Buffer,
        mut done: impl FnMut(usize, &mut Sums) -> Result<()>,
    ) -> Result<Option<Buffer>> {
        for (block, saved) in self.blocks.iter().zip(saved).rev() {
            block.backward(cx, params, grads, saved, &mut dx)?;
            done(block.bucket(), grads)?;
        }
        let Some(embedding) = &self.embedding else {
            return Ok(Some(dx));
        };
        embedding.backward(cx, grads, &dx)?;
        done(embedding.bucket(), grads)?;
        Ok(None)
    }

    /// Its buckets, in the order in which backward completes them.
    pub(crate) fn buckets(&self) -> impl Iterator<Item = usize> {
        let head = self.head.as_ref().map(Head::bucket);
        let blocks = self.blocks.iter().rev().map(Block::bucket);
        let embedding = self.embedding.as_ref().map(Embedding::bucket);
        head.into_iter().chain(blocks).chain(embedding)
    }

    /// Its operations over `tokens` tokens, of which `rows` rows of the residual stream.
    pub(crate) fn plan(&self, tokens: usize, rows: usize) -> Vec<PlannedOp> {
        let embedding = self.embedding.iter().map(|e| e.plan(tokens));
        let blocks = self.blocks.iter().flat_map(|b| b.plan(tokens, rows));
        let head = self.head.iter().flat_map(|h| h.plan(tokens));
        embedding.chain(blocks).chain(head).collect()
    }
}

/// What the schedule should have brought.
pub(crate) fn missing(what: &str) -> Error {
    let message = format!("{what} is needed that did not come");
    Error::new(ErrorKind::Defect, "run_schedule", message)
}

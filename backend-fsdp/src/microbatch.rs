//! One micro-batch: gather, forward, free; gather again, backward, reduce-scatter.

use std::collections::BTreeMap;

use drivetrain_core::{
    Result,
    model::{ModelSpec, ParameterKind},
    moe::ExpertBias,
};
use tch::Tensor;

use crate::{
    asked::Asked,
    error::{Torch, torch},
    model::{Block, Head, Normed, Packed, Root, Routing, TokenGradients, TokenScores},
    overlap::{Coming, Leaving},
    router::RouterGradients,
    sharding::{Event, Gathered, ShardGroup},
    shim,
    units::Units,
};

/// What a pass over the model needs beside the weights.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pass<'a> {
    pub(crate) model: &'a ModelSpec,
    pub(crate) group: &'a ShardGroup,
    /// Units whose gathers are under way while one is computed.
    pub(crate) prefetch: usize,
    /// Whether this micro-batch's gradients are reduced over ranks, with all that were accumulated before.
    pub(crate) reduce: bool,
    /// Blocks whose activations are computed again in backward: the first ones.
    pub(crate) recompute: usize,
    /// Bytes for logits and what is derived from them.
    pub(crate) logits_budget: u64,
    /// The experts' selection bias, which goes with the weights.
    pub(crate) bias: &'a ExpertBias,
    /// Whether routers' gradients are dropped.
    pub(crate) frozen_router: bool,
}

/// A micro-batch after its forward pass through the blocks.
#[derive(Debug)]
pub(crate) struct Forwarded {
    root: Gathered,
    blocks: Vec<(Gathered, Option<Kept>)>,
    /// The scored rows before the head; `None` where nothing is scored.
    normed: Option<Normed>,
}

/// What a block keeps from forward to backward.
#[derive(Debug)]
pub(crate) struct Kept {
    /// `[T, D]`
    input: Tensor,
    /// With its graph, `[T, D]`; `None` is computed again.
    output: Option<Tensor>,
    /// With its graph where the output has one; `None` without experts.
    routing: Option<Routing>,
}

impl Forwarded {
    /// How each layer with experts chose, where there were tokens.
    pub(crate) fn routed(&self) -> BTreeMap<usize, &Routing> {
        let kept = self.blocks.iter().map(|(_, kept)| kept.as_ref());
        let routing = kept.map(|kept| kept.and_then(|kept| kept.routing.as_ref()));
        let routed = routing.enumerate();
        routed
            .filter_map(|(layer, routing)| Some((layer, routing?)))
            .collect()
    }
}

/// Gradients on their way back from the head.
#[derive(Debug)]
pub(crate) struct HeadGradients {
    root: Vec<Tensor>,
    d_hidden: Tensor,
}

impl Pass<'_> {
    /// Forward with graphs kept. Collective, whatever the micro-batch holds.
    pub(crate) fn forward(&self, units: &Units, packed: &Packed) -> Result<Forwarded> {
        let shards = units.weights();
        let mut coming = Coming::default();
        let root = coming.next(self, units, &shards)?;
        let mut blocks = Vec::with_capacity(self.model.num_layers());
        let mut x = self.embed(units, &root, packed)?;
        for layer in 0..self.model.num_layers() {
            let mut whole = coming.next(self, units, &shards)?;
            let kept = match &mut x {
                Some(x) => {
                    let input = x.detach().set_requires_grad(true);
                    let graph = layer >= self.recompute;
                    let (output, routing) =
                        self.block(units, layer, &whole, &input, packed, graph)?;
                    *x = output.detach();
                    Some(Kept {
                        input,
                        output: graph.then_some(output),
                        routing,
                    })
                }
                None => None,
            };
            self.group.residents().note(Event::Forward, layer + 1);
            // The last one's backward comes next.
            if layer + 1 < self.model.num_layers() {
                self.group.reshard(&mut whole)?;
            }
            blocks.push((whole, kept));
        }
        let normed = self.norm(units, &root, x.as_ref(), packed)?;
        Ok(Forwarded {
            root,
            blocks,
            normed,
        })
    }

    /// Scores with any weights, keeping nothing. Collective.
    pub(crate) fn score(
        &self,
        units: &Units,
        shards: &[&Tensor],
        packed: &Packed,
        asked: &Asked,
    ) -> Result<TokenScores> {
        let mut coming = Coming::default();
        let root = coming.next(self, units, shards)?;
        let mut x = self.embed(units, &root, packed)?;
        for layer in 0..self.model.num_layers() {
            let whole = coming.next(self, units, shards)?;
            if let Some(x) = &mut x {
                *x = self.block(units, layer, &whole, x, packed, false)?.0;
            }
        }
        match self.norm(units, &root, x.as_ref(), packed)? {
            Some(normed) => self.score_rows(units, &root, &normed, asked),
            None => Ok(TokenScores::none(asked)),
        }
    }

    /// The scores of a forwarded micro-batch.
    pub(crate) fn score_forwarded(
        &self,
        units: &Units,
        forwarded: &Forwarded,
        asked: &Asked,
    ) -> Result<TokenScores> {
        match &forwarded.normed {
            Some(normed) => self.score_rows(units, &forwarded.root, normed, asked),
            None => Ok(TokenScores::none(asked)),
        }
    }

    /// Through the head and back; the scores come on the way. `None` where nothing is scored.
    pub(crate) fn backward_head(
        &self,
        units: &Units,
        forwarded: &Forwarded,
        asked: &Asked,
        gradients: &TokenGradients,
    ) -> Result<Option<(TokenScores, HeadGradients)>> {
        let Some(normed) = &forwarded.normed else {
            return Ok(None);
        };
        let root = self.root(units, &forwarded.root);
        let run = || -> Torch<_> {
            let mut grads = root.zero_gradients()?;
            let weight = root.head();
            let (scores, d_hidden) = self.head(&weight, asked).backward(
                &normed.hidden,
                &asked.targets,
                gradients,
                root.head_gradient(&mut grads),
            )?;
            Ok(Some((
                scores,
                HeadGradients {
                    root: grads,
                    d_hidden,
                },
            )))
        };
        run().map_err(torch("head_backward"))
    }

    /// Back through the blocks into the sharded gradients, from those of the head and, by layer, of the router's losses.
    /// Collective; without gradients it adds 0.
    pub(crate) fn backward(
        &self,
        units: &mut Units,
        packed: &Packed,
        mut forwarded: Forwarded,
        head: Option<HeadGradients>,
        router: &BTreeMap<usize, RouterGradients>,
    ) -> Result<()> {
        let (mut root_gradients, mut d_x) = (None, None);
        if let (Some(mut head), Some(normed)) = (head, forwarded.normed.take()) {
            let root = self.root(units, &forwarded.root);
            let back = root.backward_norm(&normed, &head.d_hidden, packed, &mut head.root);
            d_x = Some(back.map_err(torch("norm_backward"))?);
            root_gradients = Some(head.root);
        }
        let mut coming = Coming::default();
        let mut leaving = Leaving::default();
        for layer in (0..self.model.num_layers()).rev() {
            let Some((whole, kept)) = coming.next_again(self, units, &mut forwarded.blocks)? else {
                break;
            };
            let gradients = match (kept, &mut d_x) {
                (Some(kept), Some(d_x)) => {
                    let back = (d_x, router.get(&layer));
                    Some(self.backward_block(units, layer, &whole, kept, packed, back)?)
                }
                _ => None,
            };
            drop(whole);
            self.group.residents().note(Event::Backward, layer + 1);
            leaving.add(self, units, layer + 1, gradients)?;
        }
        if let (Some(gradients), Some(d_x)) = (&mut root_gradients, d_x) {
            let root = self.root(units, &forwarded.root);
            root.backward_embed(&d_x, packed, gradients)
                .map_err(torch("embed_backward"))?;
        }
        drop(forwarded);
        leaving.add(self, units, 0, root_gradients)?;
        leaving.finish(self, units)
    }

    /// One block back: its parameters' gradients; `d_x` becomes that of its input.
    fn backward_block(
        &self,
        units: &Units,
        layer: usize,
        whole: &Gathered,
        kept: Kept,
        packed: &Packed,
        (d_x, router): (&mut Tensor, Option<&RouterGradients>),
    ) -> Result<Vec<Tensor>> {
        let _span = drivetrain_core::trace::compute_layer("block backward", layer);
        let input = kept.input;
        let (output, routing) = match kept.output {
            Some(output) => (output, kept.routing),
            None => self.block(units, layer, whole, &input, packed, true)?,
        };
        let mut outputs = vec![(&output, &*d_x)];
        if let (Some(routing), Some(router)) = (&routing, router) {
            let by_probs = router.probs.as_ref().map(|d| (&routing.probs, d));
            let by_log_sum = router.log_sum.as_ref().map(|d| (&routing.log_sum, d));
            outputs.extend(by_probs.into_iter().chain(by_log_sum));
        }
        let inputs: Vec<_> = std::iter::once(&input).chain(whole.parameters()).collect();
        let mut gradients = shim::gradients(&outputs, &inputs).map_err(torch("block_backward"))?;
        *d_x = gradients.remove(0);
        if self.frozen_router {
            let specs = units.all[layer + 1].layout.specs().iter();
            let routers = gradients.iter_mut().zip(specs);
            for (gradient, _) in routers.filter(|(_, s)| s.kind == ParameterKind::Router) {
                *gradient = gradient.f_zeros_like().map_err(torch("block_backward"))?;
            }
        }
        Ok(gradients)
    }

    fn root<'g>(&self, units: &Units, whole: &'g Gathered) -> Root<'g> {
        Root::new(units.root, self.model.rms_norm_eps, whole.parameters())
    }

    fn head<'w>(&self, weight: &'w Tensor, asked: &Asked) -> Head<'w> {
        Head {
            weight,
            temperature: asked.temperature,
            budget_bytes: self.logits_budget,
            entropy: asked.entropy,
        }
    }

    /// `None` for a micro-batch of no tokens, through which nothing is computed.
    fn embed(&self, units: &Units, root: &Gathered, packed: &Packed) -> Result<Option<Tensor>> {
        match packed.num_tokens {
            0 => Ok(None),
            _ => self
                .root(units, root)
                .embed(packed)
                .map(Some)
                .map_err(torch("embed")),
        }
    }

    fn block(
        &self,
        units: &Units,
        layer: usize,
        whole: &Gathered,
        x: &Tensor,
        packed: &Packed,
        graph: bool,
    ) -> Result<(Tensor, Option<Routing>)> {
        let _span = drivetrain_core::trace::compute_layer("block forward", layer);
        let specs = units.all[layer + 1].layout.specs();
        let window = self.model.layers[layer].sliding_window;
        let block = Block::new(
            units.shape,
            window,
            self.bias.of(layer),
            specs,
            whole.parameters(),
        );
        let run = || block.forward(x, packed);
        let output = match graph {
            true => tch::with_grad(run),
            false => tch::no_grad(run),
        };
        output.map_err(torch("block_forward"))
    }

    fn norm(
        &self,
        units: &Units,
        root: &Gathered,
        x: Option<&Tensor>,
        packed: &Packed,
    ) -> Result<Option<Normed>> {
        match x {
            Some(x) if packed.num_scored() > 0 => self
                .root(units, root)
                .select_and_norm(x, packed)
                .map(Some)
                .map_err(torch("final_norm")),
            _ => Ok(None),
        }
    }

    fn score_rows(
        &self,
        units: &Units,
        root: &Gathered,
        normed: &Normed,
        asked: &Asked,
    ) -> Result<TokenScores> {
        let weight = self.root(units, root).head();
        self.head(&weight, asked)
            .score(&normed.hidden, &asked.targets)
            .map_err(torch("head_forward"))
    }
}

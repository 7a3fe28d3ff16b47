//! One micro-batch: gather, forward, free; gather again, backward, reduce-scatter.

use std::collections::BTreeMap;

use drivetrain_core::{
    Result,
    batch::Batch,
    model::{ModelSpec, ParameterKind},
    moe::ExpertBias,
    objective::TokenOutputs,
};
use tch::Tensor;

use crate::{
    error::{Torch, torch},
    model::{Block, Head, Normed, Packed, Root, Routing, Targets, TokenGradients, TokenScores},
    router::RouterGradients,
    sharding::{Gathered, ShardGroup},
    shim,
    units::Units,
};

/// What a pass over the model needs beside the weights.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pass<'a> {
    pub(crate) model: &'a ModelSpec,
    pub(crate) group: &'a ShardGroup,
    /// Whether a block's whole weights are freed between its forward and backward.
    pub(crate) reshard: bool,
    /// Blocks whose activations are computed again in backward: the first ones.
    pub(crate) recompute: usize,
    /// Bytes for logits and what is derived from them.
    pub(crate) logits_budget: u64,
    /// The experts' selection bias, which goes with the weights.
    pub(crate) bias: &'a ExpertBias,
    /// Whether routers' gradients are dropped.
    pub(crate) frozen_router: bool,
}

/// What the head is asked for.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) temperature: f64,
    pub(crate) entropy: bool,
    pub(crate) targets: Targets,
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
struct Kept {
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
        let root = self.gather(units, 0, &units.all[0].weight)?;
        let mut blocks = Vec::with_capacity(self.model.num_layers());
        let mut x = self.embed(units, &root, packed)?;
        for layer in 0..self.model.num_layers() {
            let unit = layer + 1;
            let mut whole = self.gather(units, unit, &units.all[unit].weight)?;
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
            if self.reshard && unit < self.model.num_layers() {
                whole.free()?;
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
        let root = self.gather(units, 0, shards[0])?;
        let mut x = self.embed(units, &root, packed)?;
        for layer in 0..self.model.num_layers() {
            let whole = self.gather(units, layer + 1, shards[layer + 1])?;
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
        for layer in (0..self.model.num_layers()).rev() {
            let unit = layer + 1;
            let Some((mut whole, kept)) = forwarded.blocks.pop() else {
                break;
            };
            self.group.gather_again(
                &units.all[unit].layout,
                &units.all[unit].weight,
                &mut whole,
            )?;
            let gradients = match (kept, &mut d_x) {
                (Some(kept), Some(d_x)) => {
                    let back = (d_x, router.get(&layer));
                    Some(self.backward_block(units, layer, &whole, kept, packed, back)?)
                }
                _ => None,
            };
            drop(whole);
            self.group.reduce(&mut units.all[unit], gradients)?;
        }
        if let (Some(gradients), Some(d_x)) = (&mut root_gradients, d_x) {
            let root = self.root(units, &forwarded.root);
            root.backward_embed(&d_x, packed, gradients)
                .map_err(torch("embed_backward"))?;
        }
        drop(forwarded);
        self.group.reduce(&mut units.all[0], root_gradients)
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

    fn gather(&self, units: &Units, unit: usize, shard: &Tensor) -> Result<Gathered> {
        self.group.gather(&units.all[unit].layout, shard)
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

impl TokenScores {
    fn none(asked: &Asked) -> Self {
        Self {
            log_probs: Vec::new(),
            entropy: asked.entropy.then(Vec::new),
            log_probs_at: asked.targets.at.as_ref().map(|_| Vec::new()),
        }
    }

    /// Scores in their tokens' places, 0 elsewhere.
    pub(crate) fn spread(self, packed: &Packed, width_at: usize) -> TokenOutputs {
        let spread = |values: Vec<f64>, width: usize| {
            let mut all = vec![0.0; packed.num_tokens * width];
            for (row, &token) in packed.scored.iter().enumerate() {
                let from = &values[row * width..(row + 1) * width];
                all[token * width..(token + 1) * width].copy_from_slice(from);
            }
            all
        };
        TokenOutputs {
            log_probs: spread(self.log_probs, 1),
            entropy: self.entropy.map(|v| spread(v, 1)),
            log_probs_at: self.log_probs_at.map(|v| spread(v, width_at)),
            values: None,
        }
    }
}

impl TokenGradients {
    /// The scored tokens' derivatives out of those of all tokens.
    pub(crate) fn select(
        packed: &Packed,
        log_probs: &[f64],
        entropy: Option<&[f64]>,
        log_probs_at: Option<(&[f64], usize)>,
    ) -> Torch<Self> {
        let select = |values: &[f64], width: usize| {
            let rows: Vec<f32> = packed
                .scored
                .iter()
                .flat_map(|&t| &values[t * width..(t + 1) * width])
                .map(|&x| x as f32)
                .collect();
            Tensor::f_from_slice(&rows)?.f_view([packed.scored.len() as i64, width as i64])
        };
        Ok(Self {
            log_probs: select(log_probs, 1)?,
            entropy: entropy.map(|v| select(v, 1)).transpose()?,
            log_probs_at: log_probs_at.map(|(v, k)| select(v, k)).transpose()?,
        })
    }
}

/// What the head is asked for on a micro-batch, and the number of further ids a token.
///
/// # Errors
/// `Data` if the column of further ids is none; torch's.
pub(crate) fn ask(
    part: &Batch,
    packed: &Packed,
    temperature: f64,
    entropy: bool,
    log_probs_at: Option<&str>,
) -> Result<(Asked, usize)> {
    let (at, width) = match log_probs_at {
        None => (None, 0),
        Some(name) => {
            let (ids, width) = part.token_ids(name)?;
            let rows = packed.scored.iter();
            let scored: Vec<i64> = rows
                .flat_map(|&t| &ids[t * width..(t + 1) * width])
                .copied()
                .collect();
            let shape = [packed.num_scored() as i64, width as i64];
            let ids = Tensor::f_from_slice(&scored).and_then(|ids| ids.f_view(shape));
            (Some(ids.map_err(torch("upload_batch"))?), width)
        }
    };
    let targets = Targets {
        tokens: packed.targets.shallow_clone(),
        at,
    };
    let asked = Asked {
        temperature,
        entropy,
        targets,
    };
    Ok((asked, width))
}

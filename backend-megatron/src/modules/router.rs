//! The router of a layer with experts: whom each token goes to, with what weight, and the losses that train it.
//!
//! Each rank routes M of the rows, its own. The softmax and all after it run in f64; the product before it in f32, or
//! in f64 where the job asks for that.

use drivetrain_core::{
    DType, Result,
    batch::BatchTotals,
    communicator::{Communicator, ReduceOp},
    config::{JobConfig, LoadBalancing},
    model::{ModelSpec, MoeSpec},
    moe::{RouterLosses, no_expert_tokens},
    plan::PlannedOp,
};
use drivetrain_kernels::ops::{
    linear::{self, LinearDims},
    router::{self, Derivatives, RouterDims, Routing},
};

use super::{Context, planned};
use crate::{
    weights::{Buffers, LayoutBuilder, Sums, TensorRef},
    workspace::{Buffer, Lent},
};

/// Weight [X, D].
#[derive(Debug, Clone)]
pub(super) struct Router {
    weight: TensorRef,
    layer: usize,
    moe: MoeSpec,
    width: usize,
    in_f64: bool,
    frozen: bool,
}

/// What a training pass computes the router's losses with.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RouterGoal<'a> {
    pub(crate) model: &'a ModelSpec,
    pub(crate) losses: &'a RouterLosses,
    pub(crate) totals: &'a BatchTotals,
}

impl RouterGoal<'_> {
    /// Nothing counted yet.
    pub(crate) fn tally(&self) -> RouterTally {
        RouterTally {
            expert_tokens: no_expert_tokens(self.model),
            ..RouterTally::default()
        }
    }
}

/// What a pass learns of its routers: of its own layers, and of all rows of its share.
#[derive(Debug, Clone, Default)]
pub(crate) struct RouterTally {
    /// Counted tokens of each expert, by layer.
    pub(crate) expert_tokens: Vec<Vec<u64>>,
    /// The load-balancing loss without its coefficient.
    pub(crate) balancing: f64,
    /// The z-loss likewise.
    pub(crate) z: f64,
}

/// A layer's routing of M rows.
#[derive(Debug)]
pub(super) struct Routed {
    probs: Lent<f64>,              // [M, X]
    lse: Lent<f64>,                // [M]
    pub(super) experts: Lent<u32>, // [M, k]
    pub(super) weights: Buffer,    // [M, k]
    /// Derivatives of the load-balancing loss by a row's probs, for each group of tokens; empty where there is no loss.
    slopes: Vec<Vec<f64>>,
}

impl Router {
    /// Places the weight of layer `index`. Every tensor rank routes rows of its own.
    ///
    /// # Errors
    /// `Defect` from the layout.
    pub(super) fn new(
        (spec, moe): (&ModelSpec, MoeSpec),
        index: usize,
        config: &JobConfig,
        name: &str,
        layout: &mut LayoutBuilder,
    ) -> Result<Self> {
        Ok(Self {
            weight: layout.stack(&[name])?,
            layer: index,
            moe,
            width: spec.hidden_size,
            in_f64: config.moe.router_dtype == DType::F64,
            frozen: config.moe.frozen_router,
        })
    }

    /// Routes x [M, D]. Collective over the ranks that see the same tokens, in training.
    ///
    /// # Errors
    /// The communicator's.
    pub(super) fn forward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        x: &[f32],
        tally: &mut RouterTally,
    ) -> Result<Routed> {
        let dims = self.dims(x);
        let RouterDims {
            tokens,
            experts,
            top_k,
            ..
        } = dims;
        let logits = self.logits(cx, params, x);
        let mut routed = Routed {
            probs: cx.workspace.take_of(tokens * experts),
            lse: cx.workspace.take_of(tokens),
            experts: cx.workspace.take_of(tokens * top_k),
            weights: cx.workspace.take(tokens * top_k),
            slopes: Vec::new(),
        };
        let bias: Option<Vec<f32>> = cx
            .bias
            .of(self.layer)
            .map(|b| b.iter().map(|&b| b as f32).collect());
        let routing = Routing {
            probs: &mut routed.probs,
            lse: &mut routed.lse,
            experts: &mut routed.experts,
            weights: &mut routed.weights,
        };
        router::forward(cx.cpu, &dims, &logits, bias.as_deref(), routing);
        if let Some(goal) = cx.router {
            self.count(cx, goal, &dims, &mut routed, tally)?;
        }
        Ok(routed)
    }

    fn logits(&self, cx: &Context<'_>, params: &Buffers, x: &[f32]) -> Lent<f64> {
        let (dims, weight) = (self.dims(x), params.get(&self.weight));
        let len = dims.tokens * dims.experts;
        let mut logits = cx.workspace.take_of::<f64>(len);
        if self.in_f64 {
            router::project_f64(cx.cpu, &dims, x, weight, &mut logits);
            return logits;
        }
        let mut narrow = cx.workspace.take(len);
        let product = LinearDims::new(dims.tokens, self.width, dims.experts);
        linear::forward(cx.cpu, &product, x, weight, None, &mut narrow);
        let wide = logits.iter_mut().zip(&*narrow);
        wide.for_each(|(wide, &narrow)| *wide = narrow.into());
        logits
    }

    /// Loads of the experts over each group of tokens, and what the losses come to.
    fn count(
        &self,
        cx: &Context<'_>,
        goal: RouterGoal<'_>,
        dims: &RouterDims,
        routed: &mut Routed,
        tally: &mut RouterTally,
    ) -> Result<()> {
        let Some(ranks) = &cx.ranks.experts else {
            return Ok(());
        };
        let (losses, x) = (goal.losses, dims.experts);
        let counted = &cx.packed.counted;
        let rows = cx.distinct_rows();
        let by_sequence = losses.balancing == Some(LoadBalancing::Sequence);
        let num_groups = match by_sequence {
            true => counted.lengths.len(),
            false => 1,
        };
        let group = |row: usize| counted.sequence[rows.start + row];
        // Of each group, tokens and sums of p by expert; and the z-loss.
        let mut sums = vec![0.0; num_groups * 2 * x + 1];
        for row in 0..dims.tokens {
            let Some(sequence) = group(row) else { continue };
            let at = if by_sequence { sequence * 2 * x } else { 0 };
            for &expert in &routed.experts[row * dims.top_k..][..dims.top_k] {
                sums[at + expert as usize] += 1.0;
            }
            for (sum, p) in sums[at + x..at + 2 * x]
                .iter_mut()
                .zip(&routed.probs[row * x..])
            {
                *sum += p;
            }
            let weight = losses.z_weight(goal.totals, counted.lengths[sequence]);
            let end = num_groups * 2 * x;
            sums[end] += weight * routed.lse[row] * routed.lse[row];
        }
        sum(&*ranks.sequences, &mut sums)?;
        let z = sums.pop().unwrap_or_default();
        if losses.z_coefficient != 0.0 {
            tally.z += z / losses.z_coefficient;
        }
        for loads in sums.chunks_exact(2 * x) {
            let all = &mut tally.expert_tokens[self.layer];
            all.iter_mut().zip(loads).for_each(|(n, &m)| *n += m as u64);
        }
        let Some(form) = losses.balancing else {
            return Ok(());
        };
        for (index, loads) in sums.chunks_exact(2 * x).enumerate() {
            let (mut counts, probs) = (loads[..x].to_vec(), &loads[x..]);
            let (num_sequences, num_tokens) = match form {
                LoadBalancing::Sequence => (1, counted.lengths[index]),
                LoadBalancing::Global => {
                    let own = [counted.lengths.len() as f64, counted.num_tokens() as f64];
                    counts.extend(own);
                    sum(&*ranks.data, &mut counts)?;
                    (counts[x] as usize, counts[x + 1] as usize)
                }
            };
            let tokens: Vec<u64> = counts[..x].iter().map(|&n| n as u64).collect();
            let slopes = losses.balancing_slopes(goal.totals, num_sequences, num_tokens, &tokens);
            let loss: f64 = slopes.iter().zip(probs).map(|(s, p)| s * p).sum();
            tally.balancing += loss / losses.balancing_coefficient;
            routed.slopes.push(slopes);
        }
        Ok(())
    }

    /// Adds the gradient of x [M, D] to `dx`, from that of the weights; adds or sets that of the router's weight.
    #[allow(clippy::too_many_arguments)] // the operands of one op
    pub(super) fn backward(
        &self,
        cx: &Context<'_>,
        params: &Buffers,
        grads: &mut Sums,
        routed: &Routed,
        d_weights: &[f32], // [M, k]
        x: &[f32],         // [M, D]
        dx: &mut [f32],    // [M, D]
    ) {
        let dims = self.dims(x);
        let (d_probs, d_lse) = self.losses_backward(cx, &dims, routed);
        let derivatives = Derivatives {
            probs: &routed.probs,
            experts: &routed.experts,
            weights: &routed.weights,
            d_weights,
            d_probs: d_probs.as_deref(),
            d_lse: d_lse.as_deref(),
        };
        let mut dlogits = cx.workspace.take_of::<f64>(dims.tokens * dims.experts);
        router::backward(cx.cpu, &dims, &derivatives, &mut dlogits);
        let (weight, dweight) = (params.get(&self.weight), grads.get_mut(&self.weight));
        if !cx.accumulate {
            dweight.fill(0.0);
        }
        let dweight = (!self.frozen).then_some(dweight);
        if self.in_f64 {
            router::project_f64_backward(cx.cpu, &dims, &dlogits, x, weight, dx, dweight);
            return;
        }
        let wide = dlogits;
        let mut dlogits = cx.workspace.take(wide.len());
        let narrow = dlogits.iter_mut().zip(&*wide);
        narrow.for_each(|(narrow, &wide)| *narrow = wide as f32);
        let product = LinearDims::new(dims.tokens, self.width, dims.experts);
        linear::backward_input(cx.cpu, &product, &dlogits, weight, true, dx);
        if let Some(dweight) = dweight {
            linear::backward_weight(cx.cpu, &product, &dlogits, x, true, dweight);
        }
    }

    /// Derivatives of the router's losses by probs [M, X] and lse [M].
    fn losses_backward(
        &self,
        cx: &Context<'_>,
        dims: &RouterDims,
        routed: &Routed,
    ) -> (Option<Lent<f64>>, Option<Lent<f64>>) {
        let Some(goal) = cx.router else {
            return (None, None);
        };
        let counted = &cx.packed.counted;
        let first = cx.distinct_rows().start;
        let sequences = &counted.sequence[first..first + dims.tokens];
        let zero = vec![0.0; dims.experts];
        let d_probs = (!routed.slopes.is_empty()).then(|| {
            let of = |sequence: &Option<usize>| match (sequence, routed.slopes.as_slice()) {
                (None, _) => &zero,
                (Some(_), [all]) if goal.losses.balancing == Some(LoadBalancing::Global) => all,
                (Some(sequence), slopes) => &slopes[*sequence],
            };
            let mut d_probs = cx.workspace.take_of::<f64>(dims.tokens * dims.experts);
            let rows = d_probs.chunks_exact_mut(dims.experts).zip(sequences);
            rows.for_each(|(row, sequence)| row.copy_from_slice(of(sequence)));
            d_probs
        });
        let d_lse = (goal.losses.z_coefficient != 0.0).then(|| {
            let of = |(sequence, lse): (&Option<usize>, &f64)| match sequence {
                None => 0.0,
                Some(s) => 2.0 * lse * goal.losses.z_weight(goal.totals, counted.lengths[*s]),
            };
            let mut d_lse = cx.workspace.take_of::<f64>(dims.tokens);
            let rows = d_lse.iter_mut().zip(sequences.iter().zip(&*routed.lse));
            rows.for_each(|(d, row)| *d = of(row));
            d_lse
        });
        (d_probs, d_lse)
    }

    /// Its product and choice over `rows` rows.
    pub(super) fn plan(&self, module: &str, rows: usize) -> Vec<PlannedOp> {
        let (x, k) = (self.moe.num_experts, self.moe.experts_per_token);
        // p and lse in f64; experts, their weights, and where each goes and comes from.
        let kept = rows * ((x + 1) * size_of::<f64>() + 4 * k * size_of::<f32>());
        vec![
            planned("gemm", format!("{module}.gate"), [rows, x, self.width], 0),
            planned("router", format!("{module}.router"), [rows, x, k], kept),
        ]
    }

    fn dims(&self, x: &[f32]) -> RouterDims {
        RouterDims {
            tokens: x.len() / self.width,
            experts: self.moe.num_experts,
            top_k: self.moe.experts_per_token,
            renormalise: self.moe.norm_topk_prob,
        }
    }
}

fn sum(group: &dyn Communicator, values: &mut [f64]) -> Result<()> {
    match group.world_size() {
        1 => Ok(()),
        _ => group.all_reduce(values.into(), ReduceOp::Sum)?.wait(),
    }
}

//! One transformer block.

use drivetrain_core::{
    DType,
    config::{JobConfig, RecomputeModule},
    model::{ModelSpec, MoeSpec, ParameterKind, ParameterSpec},
};
use tch::{Kind, Tensor};

use super::{
    Packed, Routing,
    attention::{attend, rotate},
    experts::Experts,
    linear::linear,
};
use crate::{
    error::Torch,
    shim::{Recomputed, recomputed, rms_norm},
};

/// Sizes that all blocks share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockShape {
    head_dim: i64,
    eps: f64,
    moe: Option<MoeSpec>,
    /// Of routers.
    router: Kind,
    again: Again,
}

/// What is computed again in backward.
#[derive(Debug, Clone, Copy)]
struct Again {
    attention_core: bool,
    norm: bool,
    mlp_activation: bool,
    moe_activation: bool,
}

impl Again {
    fn new(modules: &[RecomputeModule]) -> Self {
        let has = |module| modules.contains(&module);
        Self {
            attention_core: has(RecomputeModule::AttentionCore),
            norm: has(RecomputeModule::Norm),
            mlp_activation: has(RecomputeModule::MlpActivation),
            moe_activation: has(RecomputeModule::MoeActivation),
        }
    }
}

impl BlockShape {
    /// Those of a model, as the job says.
    pub(crate) fn new(model: &ModelSpec, config: &JobConfig) -> Self {
        Self {
            moe: model.moe,
            again: Again::new(&config.recompute.modules),
            router: match config.moe.router_dtype {
                DType::F64 => Kind::Double,
                _ => Kind::Float,
            },
            head_dim: model.head_dim as i64,
            eps: model.rms_norm_eps,
        }
    }
}

/// One block's whole parameters, by what they do.
#[derive(Debug)]
pub(crate) struct Block<'a> {
    shape: BlockShape,
    window: Option<usize>,
    bias: Option<&'a [f64]>,
    specs: &'a [ParameterSpec],
    parameters: &'a [Tensor],
}

impl<'a> Block<'a> {
    /// A block with these gathered parameters, in the order of `specs`, and the selection bias of its experts.
    pub(crate) fn new(
        shape: BlockShape,
        window: Option<usize>,
        bias: Option<&'a [f64]>,
        specs: &'a [ParameterSpec],
        parameters: &'a [Tensor],
    ) -> Self {
        Self {
            shape,
            window,
            bias,
            specs,
            parameters,
        }
    }

    /// `x` `[T, D]` through attention and feed-forward, each added to its input; with experts also how they were chosen.
    pub(crate) fn forward(&self, x: &Tensor, packed: &Packed) -> Torch<(Tensor, Option<Routing>)> {
        let x = x.f_add(&self.attention(x, packed)?)?;
        let (fed, routing) = match self.experts() {
            Some(experts) => {
                let normed = self.norm(&x, "post_attention_layernorm")?;
                let (fed, routing) = experts.forward(&normed)?;
                (fed, Some(routing))
            }
            None => (self.feed_forward(&x)?, None),
        };
        Ok((x.f_add(&fed)?, routing))
    }

    /// `None` in a layer without. An expert's parameters lie together, expert after expert.
    fn experts(&self) -> Option<Experts<'a>> {
        let spec = self.shape.moe?;
        let router = (self.specs.iter()).position(|s| s.kind == ParameterKind::Router)?;
        let first = self.specs.iter().position(|s| s.expert == Some(0))?;
        Some(Experts {
            spec,
            kind: self.shape.router,
            again: self.shape.again.moe_activation,
            bias: self.bias,
            router: self.parameters.get(router)?,
            weights: self.parameters.get(first..first + 3 * spec.num_experts)?,
        })
    }

    fn attention(&self, x: &Tensor, packed: &Packed) -> Torch<Tensor> {
        let (x, again) = self.norm_again(x, "input_layernorm")?;
        let project = |name: &str| self.linear(&x, &format!("self_attn.{name}_proj"));
        let (q, k, v) = (project("q")?, project("k")?, project("v")?);
        discard(again, &[&q, &k, &v])?;
        let heads = |x: Tensor| x.f_view([x.size()[0], -1, self.shape.head_dim]);
        let (q, k, v) = (heads(q)?, heads(k)?, heads(v)?);
        let q = rotate(&self.head_norm(q, "self_attn.q_norm")?, &packed.rotary)?;
        let k = rotate(&self.head_norm(k, "self_attn.k_norm")?, &packed.rotary)?;
        let (runs, window) = (packed.runs.clone(), self.window);
        let core = move |t: &[Tensor]| attend(&t[0], &t[1], &t[2], &runs, window);
        let inputs = [&q, &k, &v];
        let (mixed, again) = maybe_again(self.shape.again.attention_core, &inputs, core)?; // [T, H x E]
        let y = self.linear(&mixed, "self_attn.o_proj")?;
        discard(again, &[&y])?;
        Ok(y)
    }

    fn feed_forward(&self, x: &Tensor) -> Torch<Tensor> {
        let (x, again) = self.norm_again(x, "post_attention_layernorm")?;
        let gate = self.linear(&x, "mlp.gate_proj")?; // [T, F]
        let up = self.linear(&x, "mlp.up_proj")?;
        discard(again, &[&gate, &up])?;
        let (h, again) = swiglu(self.shape.again.mlp_activation, &gate, &up)?;
        let y = self.linear(&h, "mlp.down_proj")?;
        discard(again, &[&y])?;
        Ok(y)
    }

    /// The norm that linear layers read.
    fn norm_again(&self, x: &Tensor, module: &str) -> Torch<(Tensor, Option<Recomputed>)> {
        let eps = self.shape.eps;
        let norm = move |t: &[Tensor]| rms_norm(&t[0], &t[1], eps);
        maybe_again(self.shape.again.norm, &[x, self.weight(module)?], norm)
    }

    fn linear(&self, x: &Tensor, module: &str) -> Torch<Tensor> {
        let bias = self.find(module, "bias");
        linear(x, self.weight(module)?, bias, x.size()[0])
    }

    fn norm(&self, x: &Tensor, module: &str) -> Torch<Tensor> {
        rms_norm(x, self.weight(module)?, self.shape.eps)
    }

    fn head_norm(&self, x: Tensor, module: &str) -> Torch<Tensor> {
        match self.find(module, "weight") {
            Some(weight) => rms_norm(&x, weight, self.shape.eps),
            None => Ok(x),
        }
    }

    fn weight(&self, module: &str) -> Torch<&'a Tensor> {
        self.find(module, "weight").ok_or_else(|| {
            tch::TchError::Torch(format!("the block has no parameter {module}.weight"))
        })
    }

    fn find(&self, module: &str, kind: &str) -> Option<&'a Tensor> {
        let ends = |name: &str| {
            name.strip_suffix(kind)
                .and_then(|n| n.strip_suffix('.'))
                .and_then(|n| n.strip_suffix(module))
                .is_some_and(|n| n.ends_with('.'))
        };
        let at = self.specs.iter().position(|spec| ends(&spec.name))?;
        self.parameters.get(at)
    }
}

/// `silu(gate) up`, perhaps computed again.
pub(super) fn swiglu(
    again: bool,
    gate: &Tensor,
    up: &Tensor,
) -> Torch<(Tensor, Option<Recomputed>)> {
    maybe_again(again, &[gate, up], |t| t[0].f_silu()?.f_mul(&t[1]))
}

fn maybe_again(
    again: bool,
    inputs: &[&Tensor],
    part: impl Fn(&[Tensor]) -> Torch<Tensor> + 'static,
) -> Torch<(Tensor, Option<Recomputed>)> {
    if again {
        let (output, recomputed) = recomputed(inputs, part)?;
        return Ok((output, Some(recomputed)));
    }
    let inputs: Vec<_> = inputs.iter().map(|t| t.shallow_clone()).collect();
    Ok((part(&inputs)?, None))
}

/// Frees what is computed again, now that these were computed from it.
pub(super) fn discard(again: Option<Recomputed>, consumers: &[&Tensor]) -> Torch<()> {
    again.map_or(Ok(()), |again| again.discard(consumers))
}

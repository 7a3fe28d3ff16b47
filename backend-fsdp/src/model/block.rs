//! One transformer block.

use drivetrain_core::{
    DType,
    config::MoeConfig,
    model::{ModelSpec, MoeSpec, ParameterKind, ParameterSpec},
};
use tch::{Kind, Tensor};

use super::{
    Packed, Routing,
    attention::{attend, rotate},
    experts::Experts,
    linear::linear,
};
use crate::{error::Torch, shim::rms_norm};

/// Sizes that all blocks share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockShape {
    head_dim: i64,
    eps: f64,
    moe: Option<MoeSpec>,
    /// Of routers.
    router: Kind,
}

impl BlockShape {
    /// Those of a model, its routers in the dtype that the job says.
    pub(crate) fn new(model: &ModelSpec, moe: &MoeConfig) -> Self {
        Self {
            moe: model.moe,
            router: match moe.router_dtype {
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
        let x = x.f_add(&self.attention(&self.norm(x, "input_layernorm")?, packed)?)?;
        let normed = self.norm(&x, "post_attention_layernorm")?;
        let (fed, routing) = match self.experts() {
            Some(experts) => {
                let (fed, routing) = experts.forward(&normed)?;
                (fed, Some(routing))
            }
            None => (self.feed_forward(&normed)?, None),
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
            bias: self.bias,
            router: self.parameters.get(router)?,
            weights: self.parameters.get(first..first + 3 * spec.num_experts)?,
        })
    }

    fn attention(&self, x: &Tensor, packed: &Packed) -> Torch<Tensor> {
        let heads = |name: &str| {
            let projected = self.linear(x, &format!("self_attn.{name}_proj"))?;
            projected.f_view([x.size()[0], -1, self.shape.head_dim])
        };
        let (q, k, v) = (heads("q")?, heads("k")?, heads("v")?);
        let q = rotate(&self.head_norm(q, "self_attn.q_norm")?, &packed.rotary)?;
        let k = rotate(&self.head_norm(k, "self_attn.k_norm")?, &packed.rotary)?;
        let mixed = attend(&q, &k, &v, packed, self.window)?; // [T, H x E]
        self.linear(&mixed, "self_attn.o_proj")
    }

    fn feed_forward(&self, x: &Tensor) -> Torch<Tensor> {
        let gate = self.linear(x, "mlp.gate_proj")?.f_silu()?; // [T, F]
        let up = self.linear(x, "mlp.up_proj")?;
        self.linear(&gate.f_mul(&up)?, "mlp.down_proj")
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

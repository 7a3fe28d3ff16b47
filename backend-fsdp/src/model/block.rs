//! One transformer block.

use drivetrain_core::model::{ModelSpec, ParameterSpec};
use tch::Tensor;

use super::{
    Packed,
    attention::{attend, rotate},
};
use crate::{error::Torch, shim::rms_norm};

/// Sizes that all blocks share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockShape {
    head_dim: i64,
    eps: f64,
}

impl BlockShape {
    /// Those of a model.
    pub(crate) fn new(model: &ModelSpec) -> Self {
        Self {
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
    specs: &'a [ParameterSpec],
    parameters: &'a [Tensor],
}

impl<'a> Block<'a> {
    /// A block with these gathered parameters, in the order of `specs`.
    pub(crate) fn new(
        shape: BlockShape,
        window: Option<usize>,
        specs: &'a [ParameterSpec],
        parameters: &'a [Tensor],
    ) -> Self {
        Self {
            shape,
            window,
            specs,
            parameters,
        }
    }

    /// `x` `[T, D]` through attention and feed-forward, each added to its input.
    pub(crate) fn forward(&self, x: &Tensor, packed: &Packed) -> Torch<Tensor> {
        let x = x.f_add(&self.attention(&self.norm(x, "input_layernorm")?, packed)?)?;
        x.f_add(&self.feed_forward(&self.norm(&x, "post_attention_layernorm")?)?)
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
        x.f_linear(self.weight(module)?, self.find(module, "bias"))
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

//! The feed-forward part of each layer: dense or experts.

use super::{family::Defaults, keys::Keys};
use crate::{
    Result,
    model::{Family, MlpSpec, MoeSpec},
};

const MAX_FFN: usize = 1 << 22;
/// Experts over all layers: each is three tensors, so this bounds the list of parameters.
const MAX_EXPERTS: usize = 1 << 18;

pub(super) struct Mlp {
    /// One a layer.
    pub(super) layers: Vec<MlpSpec>,
    pub(super) moe: Option<MoeSpec>,
}

pub(super) fn read(
    keys: &Keys<'_>,
    family: Family,
    defaults: &Defaults,
    num_layers: usize,
) -> Result<Mlp> {
    let ffn_size = keys.size("intermediate_size", defaults.ffn_size, MAX_FFN)?;
    match family {
        Family::Mixtral => {
            let moe = moe(keys, 8, 2, ffn_size, true, num_layers)?;
            Ok(Mlp {
                layers: vec![MlpSpec::Moe; num_layers],
                moe: Some(moe),
            })
        }
        Family::Qwen3Moe => qwen3_moe(keys, ffn_size, num_layers),
        Family::Llama | Family::Mistral | Family::Qwen2 | Family::Qwen3 => Ok(Mlp {
            layers: vec![MlpSpec::Dense { ffn_size }; num_layers],
            moe: None,
        }),
    }
}

/// Layer i has experts if `mlp_only_layers` does not name it and `decoder_sparse_step` divides i + 1.
fn qwen3_moe(keys: &Keys<'_>, ffn_size: usize, num_layers: usize) -> Result<Mlp> {
    let step = keys.size("decoder_sparse_step", 1, 1 << 31)?;
    let dense: Vec<usize> = match keys.list("mlp_only_layers")? {
        None => Vec::new(),
        Some(list) => (list.iter())
            .map(|layer| keys.size_of("mlp_only_layers", layer, 0, num_layers - 1))
            .collect::<Result<_>>()?,
    };
    let layers: Vec<MlpSpec> = (0..num_layers)
        .map(
            |i| match (i + 1).is_multiple_of(step) && !dense.contains(&i) {
                true => MlpSpec::Moe,
                false => MlpSpec::Dense { ffn_size },
            },
        )
        .collect();
    let expert_ffn = keys.size("moe_intermediate_size", 768, MAX_FFN)?;
    let norm_topk_prob = keys.flag("norm_topk_prob", false)?;
    let moe = match layers.contains(&MlpSpec::Moe) {
        true => Some(moe(keys, 128, 8, expert_ffn, norm_topk_prob, num_layers)?),
        false => None,
    };
    Ok(Mlp { layers, moe })
}

fn moe(
    keys: &Keys<'_>,
    default_experts: usize,
    default_per_token: usize,
    ffn_size: usize,
    norm_topk_prob: bool,
    num_layers: usize,
) -> Result<MoeSpec> {
    let max = MAX_EXPERTS / num_layers;
    let num_experts = match (
        keys.optional_size("num_local_experts", 1, max)?,
        keys.optional_size("num_experts", 1, max)?,
    ) {
        (Some(a), Some(b)) if a != b => {
            let expected = format!("{b}, as num_experts says");
            return Err(keys.invalid("num_local_experts", a, &expected));
        }
        (a, b) => a.or(b).unwrap_or(default_experts),
    };
    let experts_per_token = keys.size("num_experts_per_tok", default_per_token, max)?;
    if experts_per_token > num_experts {
        return Err(keys.invalid(
            "num_experts_per_tok",
            experts_per_token,
            &format!("at most the number of experts, {num_experts}"),
        ));
    }
    let coefficient = keys.number("router_aux_loss_coef")?.unwrap_or(0.001);
    if coefficient < 0.0 {
        return Err(keys.invalid("router_aux_loss_coef", coefficient, "0 or more"));
    }
    Ok(MoeSpec {
        num_experts,
        experts_per_token,
        ffn_size,
        norm_topk_prob,
        // As in transformers, the loss is asked for by this flag, not by the coefficient.
        aux_loss_coefficient: match keys.flag("output_router_logits", false)? {
            true => coefficient,
            false => 0.0,
        },
    })
}

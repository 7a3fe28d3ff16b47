//! Heads, head dim, and each layer's window.

use super::{family::Defaults, keys::Keys};
use crate::{Result, model::Family};

pub(super) struct Attention {
    pub(super) hidden_size: usize,
    pub(super) num_heads: usize,
    pub(super) num_kv_heads: usize,
    pub(super) head_dim: usize,
    /// One a layer.
    pub(super) windows: Vec<Option<usize>>,
}

pub(super) fn read(
    keys: &Keys<'_>,
    family: Family,
    defaults: &Defaults,
    num_layers: usize,
) -> Result<Attention> {
    let hidden_size = keys.size("hidden_size", defaults.hidden_size, 1 << 20)?;
    let num_heads = keys.size("num_attention_heads", defaults.num_heads, 1 << 14)?;
    let default_kv = match defaults.num_kv_heads {
        Some(count) if !keys.is_null("num_key_value_heads") => count,
        _ => num_heads,
    };
    let num_kv_heads = keys.size("num_key_value_heads", default_kv, 1 << 14)?;
    if !num_heads.is_multiple_of(num_kv_heads) {
        return Err(keys.invalid(
            "num_key_value_heads",
            num_kv_heads,
            &format!("a divisor of num_attention_heads = {num_heads}"),
        ));
    }
    Ok(Attention {
        hidden_size,
        num_heads,
        num_kv_heads,
        head_dim: head_dim(keys, defaults, hidden_size, num_heads)?,
        windows: windows(keys, family, defaults, num_layers)?,
    })
}

fn head_dim(keys: &Keys<'_>, defaults: &Defaults, hidden: usize, heads: usize) -> Result<usize> {
    let default = defaults.head_dim.filter(|_| !keys.is_null("head_dim"));
    let head_dim = match keys.optional_size("head_dim", 1, 1 << 14)?.or(default) {
        Some(head_dim) => head_dim,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            return Err(keys.invalid(
                "hidden_size",
                hidden,
                &format!("a multiple of num_attention_heads = {heads}, or a head_dim"),
            ));
        }
    };
    if !head_dim.is_multiple_of(2) {
        return Err(keys.invalid(
            "head_dim",
            head_dim,
            "an even number, since RoPE turns pairs",
        ));
    }
    Ok(head_dim)
}

/// Llama has no window, Mistral and Mixtral one for all layers, Qwen3-MoE too but behind a switch; Qwen2 and
/// Qwen3 choose by layer.
fn windows(
    keys: &Keys<'_>,
    family: Family,
    defaults: &Defaults,
    num_layers: usize,
) -> Result<Vec<Option<usize>>> {
    let stated = keys.optional_size("sliding_window", 1, 1 << 31)?;
    let default = (defaults.sliding_window).filter(|_| !keys.is_null("sliding_window"));
    let window = match family {
        Family::Llama => None,
        Family::Mistral | Family::Mixtral => stated.or(default),
        Family::Qwen2 | Family::Qwen3 | Family::Qwen3Moe => {
            let wanted = keys.flag("use_sliding_window", false)?;
            stated.or(default).filter(|_| wanted)
        }
    };
    let by_layer = matches!(family, Family::Qwen2 | Family::Qwen3);
    let first = match by_layer {
        // Larger than the number of layers is the usual way to say "none".
        true => keys
            .optional_size("max_window_layers", 0, 1 << 31)?
            .unwrap_or(28),
        false => 0,
    };
    let windows = (0..num_layers)
        .map(|i| window.filter(|_| i >= first))
        .collect();
    match keys.list("layer_types")? {
        None => Ok(windows),
        Some(types) if types.len() != num_layers => Err(keys.invalid(
            "layer_types",
            format!("{} entries", types.len()),
            &format!("one a layer: {num_layers}"),
        )),
        Some(types) => (types.iter().zip(windows))
            .enumerate()
            .map(|(layer, (kind, implied))| {
                let stated = match kind.as_str() {
                    Some("full_attention") => None,
                    Some("sliding_attention") if window.is_none() => {
                        let found = format!("sliding_attention at layer {layer}, without a window");
                        return Err(keys.invalid("layer_types", found, "sliding_window to be set"));
                    }
                    Some("sliding_attention") => window,
                    _ => {
                        let supported = "full_attention and sliding_attention";
                        return Err(keys.unsupported("layer_types", kind, supported));
                    }
                };
                if !by_layer && stated != implied {
                    let found = format!("{kind} at layer {layer}");
                    return Err(keys.unsupported("layer_types", found, "one kind for all layers"));
                }
                Ok(stated)
            })
            .collect(),
    }
}

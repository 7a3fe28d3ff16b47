//! RoPE in both spellings: `rope_scaling` with `rope_theta` beside it, and `rope_parameters` with all inside.

use super::keys::Keys;
use crate::{
    Result,
    model::{RopeScaling, RopeSpec},
};

const SUPPORTED: &str = "default, linear, llama3 and yarn";

pub(super) fn read(keys: &Keys<'_>, default_theta: f64, max_positions: usize) -> Result<RopeSpec> {
    let outside = keys.number("rope_theta")?;
    let old = keys.object("rope_scaling")?;
    let new = keys.object("rope_parameters")?;
    let spec = |inside: Option<Keys<'_>>| -> Result<RopeSpec> {
        let theta = theta(keys, inside.as_ref(), outside, default_theta)?;
        let scaling = match inside {
            Some(inside) => scaling(keys, &inside, max_positions)?,
            None => RopeScaling::None,
        };
        Ok(RopeSpec { theta, scaling })
    };
    let chosen = spec(old.or(new))?;
    if old.is_some() && new.is_some() && spec(new)? != chosen {
        let expected = "the same RoPE in rope_scaling and rope_parameters, or only one of them";
        return Err(keys.invalid(
            "rope_parameters",
            "another RoPE than rope_scaling",
            expected,
        ));
    }
    Ok(chosen)
}

fn theta(
    keys: &Keys<'_>,
    inside: Option<&Keys<'_>>,
    outside: Option<f64>,
    default: f64,
) -> Result<f64> {
    let inside = inside.map_or(Ok(None), |k| k.number("rope_theta"))?;
    if let (Some(inside), Some(outside)) = (inside, outside)
        && inside != outside
    {
        let expected = format!("{inside}, as inside the RoPE parameters");
        return Err(keys.invalid("rope_theta", outside, &expected));
    }
    let theta = inside.or(outside).unwrap_or(default);
    match theta > 1.0 {
        true => Ok(theta),
        false => Err(keys.invalid("rope_theta", theta, "a number above 1")),
    }
}

fn scaling(keys: &Keys<'_>, inside: &Keys<'_>, max_positions: usize) -> Result<RopeScaling> {
    if let Some((kind, _)) = inside.iter().find(|(_, value)| value.is_object()) {
        let found = "its own RoPE for some layers";
        return Err(inside.unsupported(kind, found, "one RoPE for all layers"));
    }
    if let Some(value) = (inside.number("partial_rotary_factor")?).filter(|&v| v != 1.0) {
        return Err(inside.unsupported("partial_rotary_factor", value, "1"));
    }
    let kind = match (inside.text("rope_type")?, inside.text("type")?) {
        (Some(new), Some(old)) if new != old => {
            return Err(inside.invalid("type", old, &format!("{new}, as rope_type says")));
        }
        (new, old) => new.or(old).unwrap_or("default"),
    };
    match kind {
        "default" => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear {
            factor: inside.positive("factor", None)?,
        }),
        "llama3" => llama3(inside, original_positions(keys, inside, max_positions)?),
        "yarn" => yarn(
            inside,
            original_positions(keys, inside, max_positions)?,
            max_positions,
        ),
        other => Err(inside.unsupported("rope_type", other, SUPPORTED)),
    }
}

/// A key beside the RoPE parameters wins over one inside, and the model's own limit stands in for both.
fn original_positions(keys: &Keys<'_>, inside: &Keys<'_>, max_positions: usize) -> Result<usize> {
    let key = "original_max_position_embeddings";
    match keys.optional_size(key, 1, 1 << 31)? {
        Some(original) => Ok(original),
        None => inside.size(key, max_positions, 1 << 31),
    }
}

fn llama3(inside: &Keys<'_>, original_max_position: usize) -> Result<RopeScaling> {
    let low_freq_factor = inside.positive("low_freq_factor", None)?;
    let high_freq_factor = inside.positive("high_freq_factor", None)?;
    if high_freq_factor <= low_freq_factor {
        let expected = format!("above low_freq_factor = {low_freq_factor}");
        return Err(inside.invalid("high_freq_factor", high_freq_factor, &expected));
    }
    Ok(RopeScaling::Llama3 {
        factor: inside.positive("factor", None)?,
        low_freq_factor,
        high_freq_factor,
        original_max_position,
    })
}

fn yarn(inside: &Keys<'_>, original: usize, max_positions: usize) -> Result<RopeScaling> {
    let factor = inside.positive("factor", Some(max_positions as f64 / original as f64))?;
    // Absent, null and 0 all mean the paper's value.
    let number_or = |key, default| -> Result<f64> {
        match inside.number(key)? {
            Some(value) if value != 0.0 => Ok(value),
            _ => Ok(default),
        }
    };
    let (beta_fast, beta_slow) = (number_or("beta_fast", 32.0)?, number_or("beta_slow", 1.0)?);
    if beta_slow <= 0.0 || beta_fast < beta_slow {
        let found = format!("{beta_fast:?} with beta_slow = {beta_slow:?}");
        return Err(inside.invalid("beta_fast", found, "beta_fast >= beta_slow > 0"));
    }
    let (mscale, mscale_all_dim) = (number_or("mscale", 0.0)?, number_or("mscale_all_dim", 0.0)?);
    let temperature = |mscale: f64| match factor > 1.0 {
        true => 0.1 * mscale * factor.ln() + 1.0,
        false => 1.0,
    };
    let default = match mscale != 0.0 && mscale_all_dim != 0.0 {
        true => temperature(mscale) / temperature(mscale_all_dim),
        false => temperature(1.0),
    };
    Ok(RopeScaling::Yarn {
        factor,
        beta_fast,
        beta_slow,
        attention_factor: inside.positive("attention_factor", Some(default))?,
        truncate: inside.flag("truncate", true)?,
        original_max_position: original,
    })
}

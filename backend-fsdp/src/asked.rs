//! What the head is asked for, and what comes of it, between the batch's tokens and the scored rows.

use drivetrain_core::{Result, batch::Batch, objective::TokenOutputs};
use tch::Tensor;

use crate::{
    error::{Torch, torch},
    model::{Packed, Targets, TokenGradients, TokenScores},
};

/// What the head is asked for.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) temperature: f64,
    pub(crate) entropy: bool,
    pub(crate) targets: Targets,
}

impl TokenScores {
    /// Those of no rows.
    pub(crate) fn none(asked: &Asked) -> Self {
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
            Tensor::f_from_slice(&rows)?
                .f_view([packed.scored.len() as i64, width as i64])?
                .f_to_device(packed.tokens.device())
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
            let ids = Tensor::f_from_slice(&scored)
                .and_then(|ids| ids.f_view(shape))
                .and_then(|ids| ids.f_to_device(packed.tokens.device()));
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

//! A micro-batch as tensors: ids, rotary tables, runs of equal lengths, window masks, scored rows.

use std::{
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
};

use drivetrain_core::{Result, batch::Batch, model::ModelSpec};
use tch::{Device, Kind, Tensor};

use crate::error::{Torch, torch};

/// Sequences of one length, end to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) start: i64,
    pub(super) length: i64,
    pub(super) count: i64,
}

/// A micro-batch without padding.
#[derive(Debug)]
pub(crate) struct Packed {
    /// T.
    pub(crate) num_tokens: usize,
    /// Token ids, i64 `[T]`.
    pub(crate) tokens: Tensor,
    /// Where each scored token is, `[S]`.
    pub(crate) scored: Vec<usize>,
    /// The rows that predict them (the token before), i64 `[S]`.
    pub(crate) predictors: Tensor,
    /// Their ids, i64 `[S, 1]`.
    pub(crate) targets: Tensor,
    /// cos and sin by token, each `[T, 1, E / 2]`.
    pub(super) rotary: (Tensor, Tensor),
    pub(super) runs: Rc<Runs>,
}

/// Who attends to whom.
#[derive(Debug)]
pub(super) struct Runs {
    /// All sequences, in runs of equal length.
    pub(super) runs: Vec<Run>,
    /// Additive masks `[L, L]` by (L, window), where a window is shorter than a sequence.
    pub(super) masks: BTreeMap<(i64, i64), Tensor>,
}

impl Packed {
    /// Uploads a micro-batch whose `scored` tokens matter.
    ///
    /// # Errors
    /// Torch's.
    pub(crate) fn new(
        batch: &Batch,
        scored: &[bool],
        model: &ModelSpec,
        rope: &mut RopeTables,
        device: Device,
    ) -> Result<Self> {
        Self::upload(batch, scored, model, rope, device).map_err(torch("upload_batch"))
    }

    fn upload(
        batch: &Batch,
        scored: &[bool],
        model: &ModelSpec,
        rope: &mut RopeTables,
        device: Device,
    ) -> Torch<Self> {
        let ids: Vec<i64> = batch.tokens().iter().map(|&t| i64::from(t)).collect();
        let scored: Vec<usize> = (0..scored.len()).filter(|&t| scored[t]).collect();
        let predictors: Vec<i64> = scored.iter().map(|&t| t as i64 - 1).collect();
        let targets: Vec<i64> = scored.iter().map(|&t| ids[t]).collect();
        let runs = runs(&batch.lengths());
        let windows: BTreeSet<_> = model
            .layers
            .iter()
            .filter_map(|l| l.sliding_window)
            .collect();
        let mut masks = BTreeMap::new();
        for run in &runs {
            for window in windows.iter().map(|&w| w as i64) {
                if run.length > window {
                    masks.insert(
                        (run.length, window),
                        window_mask(run.length, window)?.f_to_device(device)?,
                    );
                }
            }
        }
        Ok(Self {
            num_tokens: ids.len(),
            tokens: Tensor::f_from_slice(&ids)?.f_to_device(device)?,
            predictors: Tensor::f_from_slice(&predictors)?.f_to_device(device)?,
            targets: Tensor::f_from_slice(&targets)?
                .f_view([-1, 1])?
                .f_to_device(device)?,
            scored,
            rotary: rope.select(model, &batch.positions(), device)?,
            runs: Rc::new(Runs { runs, masks }),
        })
    }

    /// S.
    pub(crate) fn num_scored(&self) -> usize {
        self.scored.len()
    }
}

fn runs(lengths: &[usize]) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    let mut start = 0;
    for length in lengths.iter().map(|&n| n as i64).filter(|&n| n > 0) {
        match runs.last_mut() {
            Some(run) if run.length == length => run.count += 1,
            _ => runs.push(Run {
                start,
                length,
                count: 1,
            }),
        }
        start += length;
    }
    runs
}

/// 0 where row i sees column j (`0 <= i - j < window`), else minus infinity.
fn window_mask(length: i64, window: i64) -> Torch<Tensor> {
    let hidden = Tensor::f_ones([length, length], (Kind::Bool, Device::Cpu))?;
    let hidden = hidden.f_tril(-window)?.f_logical_or(&hidden.f_triu(1)?)?;
    Tensor::f_zeros([length, length], (Kind::Float, Device::Cpu))?
        .f_masked_fill_(&hidden, f64::NEG_INFINITY)
}

/// cos and sin by position, made once for the longest sequence seen.
#[derive(Debug, Default)]
pub(crate) struct RopeTables {
    num_positions: usize,
    tables: Option<(Tensor, Tensor)>,
}

impl RopeTables {
    fn select(
        &mut self,
        model: &ModelSpec,
        positions: &[u32],
        device: Device,
    ) -> Torch<(Tensor, Tensor)> {
        let needed = positions.iter().max().map_or(1, |&p| p as usize + 1);
        let half = (model.head_dim / 2) as i64;
        let (cos, sin) = match &self.tables {
            Some(tables) if self.num_positions >= needed => tables,
            _ => {
                self.num_positions = needed.next_power_of_two();
                let (cos, sin) = model.rope.tables(model.head_dim, self.num_positions);
                let table = |values: Vec<f32>| Tensor::f_from_slice(&values)?.f_view([-1, 1, half]);
                self.tables.insert((table(cos)?, table(sin)?))
            }
        };
        let positions: Vec<i64> = positions.iter().map(|&p| p.into()).collect();
        let index = Tensor::f_from_slice(&positions)?;
        Ok((
            cos.f_index_select(0, &index)?.f_to_device(device)?,
            sin.f_index_select(0, &index)?.f_to_device(device)?,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_neighbours_make_one_run_and_empty_sequences_none() {
        let run = |start, length, count| Run {
            start,
            length,
            count,
        };
        let expected = [run(0, 3, 2), run(6, 5, 1), run(11, 3, 1)];
        assert_eq!(runs(&[3, 3, 0, 5, 3]), expected);
        assert!(runs(&[]).is_empty());
    }

    #[test]
    fn a_window_counts_the_token_itself() {
        let mask = window_mask(4, 2).unwrap();
        let rows = Vec::<Vec<f32>>::try_from(&mask).unwrap();
        let visible: Vec<Vec<usize>> = rows
            .iter()
            .map(|row| (0..4).filter(|&j| row[j] == 0.0).collect())
            .collect();
        assert_eq!(visible, [vec![0], vec![0, 1], vec![1, 2], vec![2, 3]]);
    }
}

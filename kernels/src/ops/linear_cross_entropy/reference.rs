//! The op in f64, with all logits at once.

use super::LinearCrossEntropyDims;
use crate::ops::cross_entropy::reference::{backward_row, forward_row};

fn logits(dims: &LinearCrossEntropyDims, hidden: &[f64], head: &[f64], row: usize) -> Vec<f64> {
    let hidden = &hidden[row * dims.width..][..dims.width];
    head.chunks(dims.width)
        .map(|w| w.iter().zip(hidden).map(|(w, h)| w * h).sum())
        .collect()
}

/// (log_prob, entropy, lse) of every row.
pub fn forward(
    dims: &LinearCrossEntropyDims,
    hidden: &[f64],
    head: &[f64],
    targets: &[u32],
) -> Vec<(f64, f64, f64)> {
    (0..dims.rows)
        .map(|r| {
            let x = logits(dims, hidden, head, r);
            forward_row(&x, targets[r] as usize, f64::from(dims.temperature))
        })
        .collect()
}

/// dhidden and dhead.
pub fn backward(
    dims: &LinearCrossEntropyDims,
    hidden: &[f64],
    head: &[f64],
    targets: &[u32],
    d_log_prob: &[f64],
    d_entropy: &[f64],
) -> (Vec<f64>, Vec<f64>) {
    let (mut dhidden, mut dhead) = (vec![0.0; hidden.len()], vec![0.0; head.len()]);
    for r in 0..dims.rows {
        let (x, t) = (logits(dims, hidden, head, r), targets[r] as usize);
        let d = backward_row(
            &x,
            t,
            f64::from(dims.temperature),
            d_log_prob[r],
            d_entropy[r],
        );
        for (j, d) in d.iter().enumerate() {
            for i in 0..dims.width {
                dhidden[r * dims.width + i] += d * head[j * dims.width + i];
                dhead[j * dims.width + i] += d * hidden[r * dims.width + i];
            }
        }
    }
    (dhidden, dhead)
}

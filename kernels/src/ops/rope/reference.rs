//! The rotation in f64, angles included.

use super::RopeDims;

/// Rotates contiguous x `[T, heads, E]` by position * inv_freq, scaled by factor; `sign` -1 for backward.
pub fn rotate(
    dims: &RopeDims,
    positions: &[u32],
    inv_freq: &[f64],
    factor: f64,
    sign: f64,
    x: &[f64],
) -> Vec<f64> {
    let half = dims.head_dim / 2;
    let mut y = vec![0.0; x.len()];
    for (t, &position) in positions.iter().enumerate() {
        for head in 0..dims.heads {
            let start = (t * dims.heads + head) * dims.head_dim;
            for i in 0..half {
                let angle = f64::from(position) * inv_freq[i];
                let (c, s) = (factor * angle.cos(), sign * factor * angle.sin());
                let (a, b) = (x[start + i], x[start + half + i]);
                y[start + i] = a * c - b * s;
                y[start + half + i] = b * c + a * s;
            }
        }
    }
    y
}

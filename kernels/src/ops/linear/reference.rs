//! The layer in f64, contiguous.

use super::LinearDims;

/// y = x W^T + b.
pub fn forward(dims: &LinearDims, x: &[f64], weight: &[f64], bias: Option<&[f64]>) -> Vec<f64> {
    let (d, n) = (dims.inputs, dims.outputs);
    let mut y = vec![0.0; dims.tokens * n];
    for t in 0..dims.tokens {
        for j in 0..n {
            let sum: f64 = (0..d).map(|i| x[t * d + i] * weight[j * d + i]).sum();
            y[t * n + j] = sum + bias.map_or(0.0, |bias| bias[j]);
        }
    }
    y
}

/// dx, dW, db.
pub fn backward(
    dims: &LinearDims,
    dy: &[f64],
    x: &[f64],
    weight: &[f64],
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let (d, n) = (dims.inputs, dims.outputs);
    let (mut dx, mut dw, mut db) = (vec![0.0; x.len()], vec![0.0; n * d], vec![0.0; n]);
    for t in 0..dims.tokens {
        for j in 0..n {
            let g = dy[t * n + j];
            db[j] += g;
            for i in 0..d {
                dx[t * d + i] += g * weight[j * d + i];
                dw[j * d + i] += g * x[t * d + i];
            }
        }
    }
    (dx, dw, db)
}

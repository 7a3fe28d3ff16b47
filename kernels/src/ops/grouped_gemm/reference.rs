//! The op in f64, a row at a time.

use super::GroupedDims;

fn expert_of(dims: &GroupedDims<'_>, row: usize) -> usize {
    dims.offsets.partition_point(|&start| start <= row) - 1
}

/// Calls f with the indices in x, weight and y of every product.
fn products(dims: &GroupedDims<'_>, mut f: impl FnMut(usize, usize, usize)) {
    let (d, n) = (dims.inputs, dims.outputs);
    for row in 0..dims.rows() {
        let expert = expert_of(dims, row);
        for i in 0..n {
            for j in 0..d {
                f(row * d + j, (expert * n + i) * d + j, row * n + i);
            }
        }
    }
}

/// y.
pub fn forward(dims: &GroupedDims<'_>, x: &[f64], weight: &[f64]) -> Vec<f64> {
    let mut y = vec![0.0; dims.rows() * dims.outputs];
    products(dims, |i, j, k| y[k] += x[i] * weight[j]);
    y
}

/// dx and dW, from zero.
pub fn backward(
    dims: &GroupedDims<'_>,
    dy: &[f64],
    x: &[f64],
    weight: &[f64],
) -> (Vec<f64>, Vec<f64>) {
    let (mut dx, mut dw) = (vec![0.0; x.len()], vec![0.0; weight.len()]);
    products(dims, |i, j, k| {
        dx[i] += dy[k] * weight[j];
        dw[j] += dy[k] * x[i];
    });
    (dx, dw)
}

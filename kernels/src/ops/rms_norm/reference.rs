//! The norm in f64 over contiguous rows.

use super::RmsNormDims;

/// y and inv_rms.
pub fn forward(dims: &RmsNormDims, x: &[f64], weight: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let mut y = Vec::with_capacity(x.len());
    let mut inverse = Vec::with_capacity(dims.rows());
    for row in x.chunks(dims.width) {
        let mean = row.iter().map(|x| x * x).sum::<f64>() / dims.width as f64;
        let inv_rms = 1.0 / (mean + dims.eps).sqrt();
        inverse.push(inv_rms);
        y.extend(row.iter().zip(weight).map(|(x, w)| x * inv_rms * w));
    }
    (y, inverse)
}

/// dx and dw.
pub fn backward(dims: &RmsNormDims, dy: &[f64], x: &[f64], weight: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let (_, inverse) = forward(dims, x, weight);
    let mut dx = Vec::with_capacity(x.len());
    let mut dw = vec![0.0; dims.width];
    for ((x, dy), r) in x.chunks(dims.width).zip(dy.chunks(dims.width)).zip(inverse) {
        let mean: f64 = (0..dims.width)
            .map(|i| dy[i] * weight[i] * x[i])
            .sum::<f64>()
            / dims.width as f64;
        for i in 0..dims.width {
            dx.push(r * dy[i] * weight[i] - x[i] * r.powi(3) * mean);
            dw[i] += dy[i] * x[i] * r;
        }
    }
    (dx, dw)
}

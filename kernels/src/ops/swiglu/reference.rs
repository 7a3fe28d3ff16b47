//! The op in f64, element by element.

/// silu(gate) up.
pub fn forward(gate: &[f64], up: &[f64]) -> Vec<f64> {
    gate.iter()
        .zip(up)
        .map(|(g, u)| g / (1.0 + (-g).exp()) * u)
        .collect()
}

/// dgate and dup.
pub fn backward(dy: &[f64], gate: &[f64], up: &[f64]) -> (Vec<f64>, Vec<f64>) {
    dy.iter()
        .zip(gate.iter().zip(up))
        .map(|(dy, (g, u))| {
            let s = 1.0 / (1.0 + (-g).exp());
            (dy * u * s * (1.0 + g * (1.0 - s)), dy * g * s)
        })
        .unzip()
}

//! The op in f64.

/// log_prob, entropy and lse of one row of logits.
pub fn forward_row(logits: &[f64], target: usize, temperature: f64) -> (f64, f64, f64) {
    let z: Vec<f64> = logits.iter().map(|x| x / temperature).collect();
    let peak = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let lse = peak + z.iter().map(|z| (z - peak).exp()).sum::<f64>().ln();
    let entropy = -z
        .iter()
        .filter(|z| **z > f64::NEG_INFINITY)
        .map(|z| (z - lse).exp() * (z - lse))
        .sum::<f64>();
    (z[target] - lse, entropy, lse)
}

/// Derivative of d_log_prob * log_prob + d_entropy * entropy by the logits of one row.
pub fn backward_row(
    logits: &[f64],
    target: usize,
    temperature: f64,
    d_log_prob: f64,
    d_entropy: f64,
) -> Vec<f64> {
    let (_, entropy, lse) = forward_row(logits, target, temperature);
    let gradient = |(j, x): (usize, &f64)| {
        let log_p = x / temperature - lse;
        let p = log_p.exp();
        let hit = if j == target { 1.0 } else { 0.0 };
        let plogp = if p == 0.0 { 0.0 } else { p * (log_p + entropy) };
        (d_log_prob * (hit - p) - d_entropy * plogp) / temperature
    };
    logits.iter().enumerate().map(gradient).collect()
}

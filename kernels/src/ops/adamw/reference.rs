//! The update in f64.

use super::AdamW;

/// Updates p, m and v in place.
pub fn update(config: &AdamW, p: &mut [f64], g: &[f64], m: &mut [f64], v: &mut [f64]) {
    let t = config.step as f64;
    for i in 0..p.len() {
        let g = g[i] * config.grad_scale;
        p[i] *= 1.0 - config.lr * config.weight_decay;
        m[i] = config.beta1 * m[i] + (1.0 - config.beta1) * g;
        v[i] = config.beta2 * v[i] + (1.0 - config.beta2) * g * g;
        let m_hat = m[i] / (1.0 - config.beta1.powf(t));
        let v_hat = v[i] / (1.0 - config.beta2.powf(t));
        p[i] -= config.lr * m_hat / (v_hat.sqrt() + config.eps);
    }
}

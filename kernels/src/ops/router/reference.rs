//! The op in f64, a token at a time.

/// p and lse of one row of logits.
pub fn softmax(logits: &[f64]) -> (Vec<f64>, f64) {
    let peak = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let lse = peak + logits.iter().map(|l| (l - peak).exp()).sum::<f64>().ln();
    (logits.iter().map(|l| (l - lse).exp()).collect(), lse)
}

/// The k best experts by p + bias, the best first; ties to the larger logit, then to the lower id.
pub fn choose(logits: &[f64], bias: &[f64], top_k: usize) -> Vec<usize> {
    let (p, _) = softmax(logits);
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|&a, &b| {
        let score = |e: usize| (p[e] + bias[e], logits[e]);
        score(b).partial_cmp(&score(a)).expect("no NaN")
    });
    order.truncate(top_k);
    order
}

/// Weights of the chosen experts: softmax first, then the choice.
pub fn weights(logits: &[f64], chosen: &[usize], renormalise: bool) -> Vec<f64> {
    let (p, _) = softmax(logits);
    let sum: f64 = match renormalise {
        true => chosen.iter().map(|&e| p[e]).sum(),
        false => 1.0,
    };
    chosen.iter().map(|&e| p[e] / sum).collect()
}

/// Derivative of sum d_weights w + sum d_probs p + d_lse lse by the logits of one row.
pub fn backward_row(
    logits: &[f64],
    chosen: &[usize],
    renormalise: bool,
    d_weights: &[f64],
    d_probs: &[f64],
    d_lse: f64,
) -> Vec<f64> {
    let (p, _) = softmax(logits);
    let mut dp = d_probs.to_vec();
    let sum: f64 = chosen.iter().map(|&e| p[e]).sum();
    for (&e, dw) in chosen.iter().zip(d_weights) {
        if renormalise {
            // w_i = p_i / sum, so dw_i / dp_e = (1{i = e} - w_i) / sum.
            let pull: f64 = chosen.iter().zip(d_weights).map(|(&i, d)| d * p[i]).sum();
            dp[e] += (dw - pull / sum) / sum;
        } else {
            dp[e] += dw;
        }
    }
    let mean: f64 = p.iter().zip(&dp).map(|(p, d)| p * d).sum();
    p.iter()
        .zip(&dp)
        .map(|(p, d)| p * (d - mean + d_lse))
        .collect()
}

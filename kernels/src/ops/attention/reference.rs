//! The op in f64, with the whole matrix of probabilities of a head at a time; contiguous tensors.

use super::AttentionDims;

/// Probabilities `[len, len]` of one head of one sequence, and lse of every query.
fn probabilities(
    dims: &AttentionDims<'_>,
    q: &[f64],
    k: &[f64],
    start: usize,
    len: usize,
    head: usize,
) -> (Vec<f64>, Vec<f64>) {
    let kv_head = head / (dims.heads / dims.kv_heads);
    let mut p = vec![0.0; len * len];
    let mut lse = vec![0.0; len];
    for i in 0..len {
        let seen = (i + 1).saturating_sub(dims.window.unwrap_or(usize::MAX))..i + 1;
        let q = row(dims, q, dims.heads, start + i, head);
        let scores: Vec<f64> = seen
            .clone()
            .map(|j| {
                let k = row(dims, k, dims.kv_heads, start + j, kv_head);
                f64::from(dims.scale) * q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>()
            })
            .collect();
        let peak = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        lse[i] = peak + scores.iter().map(|s| (s - peak).exp()).sum::<f64>().ln();
        for (j, s) in seen.zip(scores) {
            p[i * len + j] = (s - lse[i]).exp();
        }
    }
    (p, lse)
}

fn row<'a>(
    dims: &AttentionDims<'_>,
    x: &'a [f64],
    heads: usize,
    token: usize,
    head: usize,
) -> &'a [f64] {
    &x[(token * heads + head) * dims.head_dim..][..dims.head_dim]
}

/// out and lse.
pub fn forward(dims: &AttentionDims<'_>, q: &[f64], k: &[f64], v: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let (heads, e) = (dims.heads, dims.head_dim);
    let mut out = vec![0.0; q.len()];
    let mut all_lse = vec![0.0; dims.tokens() * heads];
    for ends in dims.cu_seqlens.windows(2) {
        let (start, len) = (ends[0], ends[1] - ends[0]);
        for head in 0..heads {
            let (p, lse) = probabilities(dims, q, k, start, len, head);
            for i in 0..len {
                all_lse[(start + i) * heads + head] = lse[i];
                for j in 0..len {
                    let v = row(
                        dims,
                        v,
                        dims.kv_heads,
                        start + j,
                        head / (heads / dims.kv_heads),
                    );
                    for x in 0..e {
                        out[((start + i) * heads + head) * e + x] += p[i * len + j] * v[x];
                    }
                }
            }
        }
    }
    (out, all_lse)
}

/// dq, dk, dv.
pub fn backward(
    dims: &AttentionDims<'_>,
    q: &[f64],
    k: &[f64],
    v: &[f64],
    dout: &[f64],
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let (heads, e) = (dims.heads, dims.head_dim);
    let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    for ends in dims.cu_seqlens.windows(2) {
        let (start, len) = (ends[0], ends[1] - ends[0]);
        for head in 0..heads {
            let kv_head = head / (heads / dims.kv_heads);
            let (p, _) = probabilities(dims, q, k, start, len, head);
            for i in 0..len {
                let d = row(dims, dout, heads, start + i, head);
                let dp: Vec<f64> = (0..len)
                    .map(|j| {
                        let v = row(dims, v, dims.kv_heads, start + j, kv_head);
                        d.iter().zip(v).map(|(d, v)| d * v).sum()
                    })
                    .collect();
                let delta: f64 = (0..len).map(|j| p[i * len + j] * dp[j]).sum();
                for j in 0..len {
                    let p = p[i * len + j];
                    let ds = f64::from(dims.scale) * p * (dp[j] - delta);
                    let query = ((start + i) * heads + head) * e;
                    let key = ((start + j) * dims.kv_heads + kv_head) * e;
                    for x in 0..e {
                        dq[query + x] += ds * k[key + x];
                        dk[key + x] += ds * q[query + x];
                        dv[key + x] += p * d[x];
                    }
                }
            }
        }
    }
    (dq, dk, dv)
}

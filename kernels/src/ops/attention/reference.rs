//! The op in f64, a query at a time over all keys of all spans; contiguous tensors.

use super::AttentionDims;

fn row<'a>(
    dims: &AttentionDims<'_>,
    x: &'a [f64],
    heads: usize,
    token: usize,
    head: usize,
) -> &'a [f64] {
    &x[(token * heads + head) * dims.head_dim..][..dims.head_dim]
}

fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

/// Rows of the keys that the query in row `query` sees, over all spans.
fn seen(dims: &AttentionDims<'_>, query: usize) -> Vec<usize> {
    let mut keys = Vec::new();
    for span in dims.spans.iter().filter(|s| s.queries.contains(&query)) {
        for key in span.keys.clone() {
            let i = (query - span.queries.start) as i128 + span.offset as i128;
            let back = i - (key - span.keys.start) as i128;
            if back >= 0 && dims.window.is_none_or(|window| back < window as i128) {
                keys.push(key);
            }
        }
    }
    keys
}

/// lse of one head of one query, and its probabilities over the keys it sees.
fn probabilities(
    dims: &AttentionDims<'_>,
    q: &[f64],
    k: &[f64],
    query: usize,
    head: usize,
    keys: &[usize],
) -> (Vec<f64>, f64) {
    let kv_head = head / (dims.heads / dims.kv_heads);
    let q = row(dims, q, dims.heads, query, head);
    let score = |&key| f64::from(dims.scale) * dot(q, row(dims, k, dims.kv_heads, key, kv_head));
    let scores: Vec<f64> = keys.iter().map(score).collect();
    let peak = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if keys.is_empty() {
        return (scores, peak);
    }
    let lse = peak + scores.iter().map(|s| (s - peak).exp()).sum::<f64>().ln();
    (scores.iter().map(|s| (s - lse).exp()).collect(), lse)
}

/// out and lse, from nothing.
pub fn forward(dims: &AttentionDims<'_>, q: &[f64], k: &[f64], v: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let (heads, e) = (dims.heads, dims.head_dim);
    let mut out = vec![0.0; q.len()];
    let mut all_lse = Vec::new();
    for query in 0..q.len() / (heads * e) {
        let keys = seen(dims, query);
        for head in 0..heads {
            let (p, lse) = probabilities(dims, q, k, query, head, &keys);
            all_lse.push(lse);
            for (&key, p) in keys.iter().zip(p) {
                let v = row(dims, v, dims.kv_heads, key, head / (heads / dims.kv_heads));
                for x in 0..e {
                    out[(query * heads + head) * e + x] += p * v[x];
                }
            }
        }
    }
    (out, all_lse)
}

/// dq, dk, dv, from zero.
pub fn backward(
    dims: &AttentionDims<'_>,
    q: &[f64],
    k: &[f64],
    v: &[f64],
    dout: &[f64],
) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let (heads, e) = (dims.heads, dims.head_dim);
    let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    for query in 0..q.len() / (heads * e) {
        let keys = seen(dims, query);
        for head in 0..heads {
            let kv_head = head / (heads / dims.kv_heads);
            let (p, _) = probabilities(dims, q, k, query, head, &keys);
            let d = row(dims, dout, heads, query, head);
            let dp: Vec<f64> = keys
                .iter()
                .map(|&key| dot(d, row(dims, v, dims.kv_heads, key, kv_head)))
                .collect();
            let delta = dot(&p, &dp);
            for ((&key, p), dp) in keys.iter().zip(p).zip(dp) {
                let ds = f64::from(dims.scale) * p * (dp - delta);
                let query = (query * heads + head) * e;
                let key = (key * dims.kv_heads + kv_head) * e;
                for x in 0..e {
                    dq[query + x] += ds * k[key + x];
                    dk[key + x] += ds * q[query + x];
                    dv[key + x] += p * d[x];
                }
            }
        }
    }
    (dq, dk, dv)
}

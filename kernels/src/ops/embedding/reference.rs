//! The op in f64.

use super::EmbeddingDims;

/// `y[t]` = `table[ids[t]]`.
pub fn forward(dims: &EmbeddingDims, table: &[f64], ids: &[u32]) -> Vec<f64> {
    ids.iter()
        .flat_map(|&id| table[id as usize * dims.width..][..dims.width].to_vec())
        .collect()
}

/// dtable, from zero.
pub fn backward(dims: &EmbeddingDims, dy: &[f64], ids: &[u32]) -> Vec<f64> {
    let mut dtable = vec![0.0; dims.vocab * dims.width];
    for (t, &id) in ids.iter().enumerate() {
        for d in 0..dims.width {
            dtable[id as usize * dims.width + d] += dy[t * dims.width + d];
        }
    }
    dtable
}

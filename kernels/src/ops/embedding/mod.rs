//! Embedding: rows of a table by id; also the gather and scatter of rows by index.
//!
//! table `[V, D]`, ids `[T]` below V, y `[T, D]`: `y[t]` = `table[ids[t]]`. Backward: `dtable[ids[t]]` += `dy[t]`, in the
//! order of t for every row, so the result does not depend on threads. No scratch.

pub mod reference;
#[cfg(test)]
mod tests;

mod cpu;

use crate::{Cpu, check};

/// Shape of the table and of the ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EmbeddingDims {
    /// T.
    pub tokens: usize,
    /// V.
    pub vocab: usize,
    /// D.
    pub width: usize,
}

/// `y[t]` = `table[ids[t]]`.
///
/// # Panics
/// If an id is not below V.
#[track_caller]
pub fn forward(
    cpu: Cpu,
    dims: &EmbeddingDims,
    table: &[f32], // [V, D]
    ids: &[u32],   // [T]
    y: &mut [f32], // [T, D]
) {
    check::len("table", table, dims.vocab * dims.width);
    check::len("y", y, dims.tokens * dims.width);
    check_ids(dims, ids);
    cpu::gather(cpu, dims.width, table, ids, y);
}

/// `dtable[ids[t]]` += `dy[t]`. Rows that no id names stay as they are.
///
/// # Panics
/// If an id is not below V.
#[track_caller]
pub fn backward(
    cpu: Cpu,
    dims: &EmbeddingDims,
    dy: &[f32],         // [T, D]
    ids: &[u32],        // [T]
    dtable: &mut [f32], // [V, D]
) {
    check::len("dtable", dtable, dims.vocab * dims.width);
    check::len("dy", dy, dims.tokens * dims.width);
    check_ids(dims, ids);
    cpu::scatter_add(cpu, dims.width, dy, ids, dtable);
}

#[track_caller]
fn check_ids(dims: &EmbeddingDims, ids: &[u32]) {
    check::len("ids", ids, dims.tokens);
    if let Some(t) = ids.iter().position(|&id| id as usize >= dims.vocab) {
        panic!(
            "embedding: id {} at {t} is not below the {} rows",
            ids[t], dims.vocab
        );
    }
}

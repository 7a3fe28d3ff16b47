//! Embedding: rows of a table by id; also the gather and scatter of rows by index.
//!
//! table `[V, D]`, ids `[T]` below V, y `[T, D]`: `y[t]` = `table[ids[t]]`. Backward: `dtable[ids[t]]` += `dy[t]`, in the
//! order of t for every row, so the result does not depend on threads. No scratch.
//!
//! A table split over ranks by rows (vocab-parallel; Shoeybi et al. 2019): each rank has some rows, all ranks
//! have the ids. An id of another shard gives a row of zeros and takes no gradient, so that the sum over all
//! shards is the whole.

pub mod reference;
#[cfg(test)]
mod tests;

mod cpu;

use crate::cuda::ops::embedding as device;
use crate::{On, check};

/// Shape of the table and of the ids, and which rows of the whole table are at hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EmbeddingDims {
    /// T.
    pub tokens: usize,
    /// V of the whole table, which the ids lie below.
    pub vocab: usize,
    /// Id of the first row; 0 unless the table is split.
    pub first_id: usize,
    /// Rows of the table: V, or a shard of it, possibly 0.
    pub rows: usize,
    /// D.
    pub width: usize,
}

impl EmbeddingDims {
    /// The whole table.
    pub fn whole(tokens: usize, vocab: usize, width: usize) -> Self {
        Self {
            tokens,
            vocab,
            first_id: 0,
            rows: vocab,
            width,
        }
    }

    /// The row of an id, if it is one of these.
    fn row(&self, id: u32) -> Option<usize> {
        let row = (id as usize).checked_sub(self.first_id)?;
        (row < self.rows).then_some(row)
    }
}

/// `y[t]` = `table[ids[t]]`, 0 for ids of other shards.
///
/// # Panics
/// If an id is not below V.
#[track_caller]
pub fn forward<'on>(
    on: impl Into<On<'on>>,
    dims: &EmbeddingDims,
    table: &[f32], // [rows, D]
    ids: &[u32],   // [T]
    y: &mut [f32], // [T, D]
) {
    check::len("table", table, dims.rows * dims.width);
    check::len("y", y, dims.tokens * dims.width);
    check_ids(dims, ids);
    match on.into() {
        On::Cpu(cpu) => cpu::gather(cpu, dims, table, ids, y),
        On::Device(unified) => unified.run(|call| {
            let (table, ids, y) = (call.input(table)?, call.input(ids)?, call.output(y)?);
            device::forward(call.device(), dims, table, ids, y)
        }),
    }
}

/// `dtable[ids[t]]` += `dy[t]`. Rows that no id names stay as they are.
///
/// # Panics
/// If an id is not below V.
#[track_caller]
pub fn backward<'on>(
    on: impl Into<On<'on>>,
    dims: &EmbeddingDims,
    dy: &[f32],         // [T, D]
    ids: &[u32],        // [T]
    dtable: &mut [f32], // [rows, D]
) {
    check::len("dtable", dtable, dims.rows * dims.width);
    check::len("dy", dy, dims.tokens * dims.width);
    check_ids(dims, ids);
    match on.into() {
        On::Cpu(cpu) => cpu::scatter_add(cpu, dims, dy, ids, dtable),
        On::Device(unified) => unified.run(|call| {
            let (dy, ids) = (call.input(dy)?, call.input(ids)?);
            let dtable = call.output(dtable)?;
            device::backward(call.device(), dims, dy, ids, dtable)
        }),
    }
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

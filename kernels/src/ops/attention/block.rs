//! What both passes share: block sizes, packing of a head into padded tiles, and which keys a query sees.

use std::ops::Range;

use super::{AttentionDims, span::Piece};
use crate::Rows;
use crate::micro::{COLUMNS, ROWS};
use crate::simd::copy;

/// Queries of a block.
pub(super) const QUERIES: usize = 64;
/// Keys of a block.
pub(super) const KEYS: usize = 256;
/// f32 between the rows of a tile of scores: an odd number of cache lines, so that a column of the tile is
/// spread over all sets of the cache.
pub(super) const SCORES: usize = KEYS + LINE;
/// f32 of a cache line: tiles start at multiples of it.
const LINE: usize = 16;

/// Sizes after padding.
#[derive(Clone, Copy)]
pub(super) struct Padded {
    /// E, a multiple of the tile's columns.
    pub(super) head_dim: usize,
    /// f32 between the rows of `[E, tokens]`: an odd number of cache lines, as for [`SCORES`].
    pub(super) len: usize,
}

impl Padded {
    pub(super) fn new(dims: &AttentionDims<'_>, len: usize) -> Self {
        Self {
            head_dim: dims.head_dim.next_multiple_of(COLUMNS),
            len: (len.div_ceil(LINE) | 1) * LINE,
        }
    }

    /// Elements of `[len, E]`, either way round.
    pub(super) fn tokens(&self) -> usize {
        self.len * self.head_dim
    }

    /// Elements of a block of queries.
    pub(super) fn queries(&self) -> usize {
        QUERIES * self.head_dim
    }
}

/// A block of queries of one head.
#[derive(Clone)]
pub(super) struct QueryBlock {
    /// Counted from the first query of the piece.
    pub(super) queries: Range<usize>,
    /// Position of the block's first query, that of the piece's first key being 0.
    position: usize,
    num_keys: usize,
    window: usize,
}

impl QueryBlock {
    pub(super) fn all(dims: &AttentionDims<'_>, piece: &Piece) -> impl Iterator<Item = Self> {
        let window = dims.window.unwrap_or(usize::MAX);
        let (len, lead, num_keys) = (piece.queries.len(), piece.lead, piece.keys.len());
        (0..len).step_by(QUERIES).map(move |start| Self {
            queries: start..len.min(start + QUERIES),
            position: lead + start,
            num_keys,
            window,
        })
    }

    /// Rows of the padded block.
    pub(super) fn padded_rows(&self) -> usize {
        self.queries.len().next_multiple_of(ROWS)
    }

    /// Blocks of keys that some query of the block sees: starts are multiples of [`KEYS`].
    pub(super) fn key_blocks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let first = self.visible(0).start / KEYS * KEYS;
        let end = (self.position + self.queries.len()).min(self.num_keys);
        (first..end)
            .step_by(KEYS)
            .map(move |start| start..end.min(start + KEYS))
    }

    /// Row r of the block sees column c of a tile over `keys` only if c <= r + diagonal.
    pub(super) fn diagonal(&self, keys: &Range<usize>) -> isize {
        self.position as isize - keys.start as isize
    }

    /// Positions of the keys that row `row` of the block sees, if there are as many keys.
    fn visible(&self, row: usize) -> Range<usize> {
        let query = self.position + row;
        (query + 1).saturating_sub(self.window)..query + 1
    }

    /// Columns of a tile over `keys` that row `row` sees; an empty range for padding rows.
    #[inline(always)]
    pub(super) fn columns(&self, row: usize, keys: &Range<usize>) -> Range<usize> {
        if row >= self.queries.len() {
            return 0..0;
        }
        let visible = self.visible(row);
        let start = visible.start.clamp(keys.start, keys.end) - keys.start;
        let end = visible.end.clamp(keys.start, keys.end) - keys.start;
        start..end
    }
}

/// One head of consecutive tokens as rows `[tokens, E]`, padded with zeros to `[rows, padded E]`.
#[inline(always)]
pub(super) fn pack_rows(
    x: Rows<'_>,
    tokens: Range<usize>,
    head: usize,
    head_dim: usize,
    padded: usize,
    to: &mut [f32],
) {
    let (used, rest) = to.split_at_mut(tokens.len() * padded);
    for (t, to) in tokens.zip(used.chunks_exact_mut(padded)) {
        copy(&x.row(t)[head * head_dim..][..head_dim], to);
        to[head_dim..].fill(0.0);
    }
    rest.fill(0.0);
}

/// One head of consecutive tokens as columns `[E, padded tokens]`, padded with zeros.
#[inline(always)]
pub(super) fn pack_columns(
    x: Rows<'_>,
    tokens: Range<usize>,
    head: usize,
    head_dim: usize,
    padded_len: usize,
    to: &mut [f32],
) {
    let len = tokens.len();
    for t0 in (0..len).step_by(LINE) {
        for e0 in (0..head_dim).step_by(LINE) {
            let (t1, e1) = (len.min(t0 + LINE), head_dim.min(e0 + LINE));
            let mut square = [[0.0; LINE]; LINE];
            for (t, line) in (t0..t1).zip(&mut square) {
                copy(&x.row(tokens.start + t)[head * head_dim..][e0..e1], line);
            }
            transpose(&mut square);
            for (e, line) in (e0..e1).zip(&square) {
                copy(&line[..t1 - t0], &mut to[e * padded_len + t0..]);
            }
        }
    }
    for row in to[..head_dim * padded_len].chunks_exact_mut(padded_len) {
        row[len..].fill(0.0);
    }
}

/// Four perfect shuffles: each moves the top bit of an element's row to the bottom of its column, and the top
/// bit of its column to the bottom of its row.
#[inline(always)]
fn transpose(x: &mut [[f32; LINE]; LINE]) {
    const HALF: usize = LINE / 2;
    for _ in 0..LINE.ilog2() {
        let from = *x;
        for i in 0..HALF {
            for j in 0..HALF {
                x[2 * i][2 * j] = from[i][j];
                x[2 * i][2 * j + 1] = from[i + HALF][j];
                x[2 * i + 1][2 * j] = from[i][j + HALF];
                x[2 * i + 1][2 * j + 1] = from[i + HALF][j + HALF];
            }
        }
    }
}

/// Cuts consecutive tiles of these sizes from a worker's share of the scratch, from a cache line on.
pub(super) fn cut<const N: usize>(scratch: &mut [f32], sizes: [usize; N]) -> [&mut [f32]; N] {
    let skip = scratch.as_ptr().align_offset(4 * LINE).min(LINE);
    let mut rest = &mut scratch[skip..];
    sizes.map(|size| {
        let (tile, after) = std::mem::take(&mut rest).split_at_mut(size.next_multiple_of(LINE));
        rest = after;
        &mut tile[..size]
    })
}

/// Elements that [`cut`] needs for these sizes.
pub(super) fn cut_len(sizes: &[usize]) -> usize {
    LINE + sizes
        .iter()
        .map(|size| size.next_multiple_of(LINE))
        .sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::{LINE, transpose};

    #[test]
    fn transposing_exchanges_rows_and_columns() {
        let mut x = [[0.0; LINE]; LINE];
        for (i, row) in x.iter_mut().enumerate() {
            for (j, x) in row.iter_mut().enumerate() {
                *x = (100 * i + j) as f32;
            }
        }
        transpose(&mut x);
        for (i, row) in x.iter().enumerate() {
            for (j, &x) in row.iter().enumerate() {
                assert_eq!(x, (100 * j + i) as f32);
            }
        }
    }
}

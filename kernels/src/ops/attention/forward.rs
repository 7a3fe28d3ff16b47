//! Blocks of queries against blocks of keys, with the softmax carried along (online).

use std::ops::Range;

use pulp::Simd;

use super::block::{Padded, QUERIES, QueryBlock, SCORES, cut, cut_len};
use super::block::{pack_columns, pack_rows};
use super::span::{Groups, Piece};
use super::{AttentionDims, Inputs};
use crate::micro::{COLUMNS, Causal, Left, Out, Right, product};
use crate::rows::SharedMut;
use crate::simd::{LANES, copy, exp, exp_below_88, fma, max_of};
use crate::{Cpu, RowsMut};

fn tile_sizes(padded: Padded) -> [usize; 7] {
    let (tokens, queries) = (padded.tokens(), padded.queries());
    [
        tokens,
        tokens,
        queries,
        queries,
        QUERIES * SCORES,
        QUERIES,
        QUERIES,
    ]
}

/// Elements of scratch a worker needs.
pub(super) fn scratch_len(dims: &AttentionDims<'_>) -> usize {
    cut_len(&tile_sizes(Padded::new(dims, dims.most_keys())))
}

pub(super) fn run(
    cpu: Cpu,
    dims: &AttentionDims<'_>,
    inputs: &Inputs<'_>,
    merge: bool,
    mut out: RowsMut<'_>,
    lse: &mut [f32],
    scratch: &mut [f32],
) {
    let groups = Groups::new(dims, false);
    if !merge {
        for t in groups
            .gaps(|piece| &piece.queries, out.rows())
            .into_iter()
            .flatten()
        {
            out.row(t).fill(0.0);
            lse[t * dims.heads..][..dims.heads].fill(f32::NEG_INFINITY);
        }
    }
    let share = scratch_len(dims);
    let (out, lse, scratch) = (&out, SharedMut::new(lse), SharedMut::new(scratch));
    groups.for_tasks(cpu, dims.kv_heads, |worker, pieces, kv_head| {
        // SAFETY: every worker has a share of its own.
        let scratch = unsafe { scratch.range(worker * share..(worker + 1) * share) };
        for piece in pieces {
            let state = State {
                merge,
                out,
                lse: &lse,
            };
            dispatch!(
                cpu, run_piece, cpu, dims, inputs, piece, kv_head, &state, scratch
            );
        }
    });
}

/// What the softmax has gathered so far: out is normalised, so out and lse are as good as sums over e^(s - lse).
struct State<'a> {
    merge: bool,
    out: &'a RowsMut<'a>,
    lse: &'a SharedMut<'a, f32>,
}

impl State<'_> {
    /// # Safety
    /// No other reference to this query and head may live at the same time.
    #[allow(clippy::mut_from_ref)]
    unsafe fn of(&self, dims: &AttentionDims<'_>, t: usize, head: usize) -> (&mut [f32], &mut f32) {
        let (e, at) = (dims.head_dim, t * dims.heads + head);
        // SAFETY: the caller's contract.
        unsafe {
            let out = self.out.band_shared(t, head * e..(head + 1) * e);
            (out, &mut self.lse.range(at..at + 1)[0])
        }
    }
}

#[inline(always)]
#[allow(clippy::too_many_arguments)] // one piece of a whole op
fn run_piece<S: Simd>(
    simd: S,
    cpu: Cpu,
    dims: &AttentionDims<'_>,
    inputs: &Inputs<'_>,
    piece: &Piece,
    kv_head: usize,
    state: &State<'_>,
    scratch: &mut [f32],
) {
    let padded = Padded::new(dims, piece.keys.len());
    let (e, e_pad) = (dims.head_dim, padded.head_dim);
    let [keys_t, values, q, acc, scores, peak, sum] = cut(scratch, tile_sizes(padded));
    let keys = piece.keys.clone();
    pack_columns(inputs.k, keys.clone(), kv_head, e, padded.len, keys_t);
    pack_rows(inputs.v, keys, kv_head, e, e_pad, values);

    let group = dims.heads / dims.kv_heads;
    for head in kv_head * group..(kv_head + 1) * group {
        for block in QueryBlock::all(dims, piece) {
            let first = piece.queries.start + block.queries.start;
            let tokens = first..first + block.queries.len();
            pack_rows(inputs.q, tokens.clone(), head, e, e_pad, q);
            acc.fill(0.0);
            peak.fill(f32::NEG_INFINITY);
            sum.fill(0.0);
            if state.merge {
                for (row, t) in tokens.clone().enumerate() {
                    // SAFETY: no other task has this query and head.
                    let (out, lse) = unsafe { state.of(dims, t, head) };
                    if *lse > f32::NEG_INFINITY {
                        copy(out, &mut acc[row * e_pad..]);
                        peak[row] = *lse;
                        sum[row] = 1.0;
                    }
                }
            }
            for keys in block.key_blocks() {
                let columns = keys.len().next_multiple_of(COLUMNS);
                let (rows, diagonal) = (block.padded_rows(), block.diagonal(&keys));
                let left = Left {
                    data: q,
                    row: e_pad,
                    col: 1,
                };
                let right = Right {
                    data: &keys_t[keys.start..],
                    row: padded.len,
                };
                let tile = Out {
                    data: scores,
                    row: SCORES,
                    accumulate: false,
                };
                product(
                    cpu,
                    (rows, columns, e),
                    Causal::Scores(diagonal),
                    left,
                    right,
                    tile,
                );
                let stats = (&mut *peak, &mut *sum);
                softmax_step(
                    simd, &block, &keys, columns, dims.scale, scores, stats, acc, e_pad,
                );
                let left = Left {
                    data: scores,
                    row: SCORES,
                    col: 1,
                };
                let right = Right {
                    data: &values[keys.start * e_pad..],
                    row: e_pad,
                };
                let tile = Out {
                    data: acc,
                    row: e_pad,
                    accumulate: true,
                };
                product(
                    cpu,
                    (rows, e_pad, keys.len()),
                    Causal::Left(diagonal),
                    left,
                    right,
                    tile,
                );
            }
            for (row, t) in tokens.enumerate() {
                // SAFETY: no other task has this query and head.
                let (out, lse) = unsafe { state.of(dims, t, head) };
                let inverse = 1.0 / sum[row];
                for (out, &x) in out.iter_mut().zip(&acc[row * e_pad..]) {
                    *out = x * inverse;
                }
                *lse = peak[row] + sum[row].ln();
            }
        }
    }
}

/// How far scores may lie above the peak they are taken from.
const SLACK: f32 = 8.0;

/// Turns a tile of scores into e^(s - peak), zero where a query sees no key, and rescales what earlier blocks
/// summed to the new peak.
#[inline(always)]
#[allow(clippy::too_many_arguments)] // the state of one row of blocks
fn softmax_step<S: Simd>(
    simd: S,
    block: &QueryBlock,
    keys: &Range<usize>,
    columns: usize,
    scale: f32,
    scores: &mut [f32],
    (peak, sum): (&mut [f32], &mut [f32]),
    acc: &mut [f32],
    e_pad: usize,
) {
    for row in 0..block.padded_rows() {
        let scores = &mut scores[row * SCORES..][..columns];
        let seen = block.columns(row, keys);
        if seen.is_empty() {
            scores.fill(0.0);
            continue;
        }
        scores[..seen.start].fill(0.0);
        scores[seen.end..].fill(0.0);
        let seen = &mut scores[seen];
        let top = max_of(simd, seen) * scale;
        // Any peak gives the same result as long as nothing overflows: a few e-folds above it are let be,
        // which spares most blocks the rescaling.
        if top > peak[row] + SLACK {
            if peak[row] > f32::NEG_INFINITY {
                let shrink = exp::<S>(peak[row] - top);
                sum[row] *= shrink;
                for x in &mut acc[row * e_pad..][..e_pad] {
                    *x *= shrink;
                }
            }
            peak[row] = top;
        }
        let total = exp_row(simd, scale, peak[row], seen);
        sum[row] += total;
    }
}

/// x <- e^(scale x - top); returns the sum.
#[inline(always)]
fn exp_row<S: Simd>(_: S, scale: f32, top: f32, row: &mut [f32]) -> f32 {
    let mut lanes = [0f32; LANES];
    let (chunks, rest) = row.as_chunks_mut::<LANES>();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *x = exp_below_88::<S>(fma::<S>(*x, scale, -top));
            *lane += *x;
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *x = exp_below_88::<S>(fma::<S>(*x, scale, -top));
        *lane += *x;
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

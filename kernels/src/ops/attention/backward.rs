//! The five products of the backward pass, block by block, with probabilities computed again from lse.

use std::ops::Range;

use pulp::Simd;

use super::block::{Padded, QUERIES, QueryBlock, SCORES, cut, cut_len};
use super::block::{pack_columns, pack_rows};
use super::span::{Groups, Piece};
use super::{AttentionDims, Gradients, Inputs, Saved};
use crate::micro::{COLUMNS, Causal, Left, Out, Right, product};
use crate::rows::SharedMut;
use crate::simd::{copy, dot_f64, exp_below_88, fma};
use crate::{Cpu, RowsMut};

fn tile_sizes(padded: Padded) -> [usize; 12] {
    let (tokens, queries, scores) = (padded.tokens(), padded.queries(), QUERIES * SCORES);
    [
        tokens, tokens, tokens, tokens, tokens, queries, queries, queries, scores, scores, QUERIES,
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
    saved: &Saved<'_>,
    accumulate: bool,
    mut gradients: Gradients<'_>,
    scratch: &mut [f32],
) {
    let groups = Groups::new(dims, true);
    if !accumulate {
        for t in groups
            .gaps(|piece| &piece.queries, gradients.dq.rows())
            .into_iter()
            .flatten()
        {
            gradients.dq.row(t).fill(0.0);
        }
        for t in groups
            .gaps(|piece| &piece.keys, gradients.dk.rows())
            .into_iter()
            .flatten()
        {
            gradients.dk.row(t).fill(0.0);
            gradients.dv.row(t).fill(0.0);
        }
    }
    let share = scratch_len(dims);
    let (gradients, scratch) = (&gradients, SharedMut::new(scratch));
    groups.for_tasks(cpu, dims.kv_heads, |worker, pieces, kv_head| {
        // SAFETY: every worker has a share of its own.
        let scratch = unsafe { scratch.range(worker * share..(worker + 1) * share) };
        for piece in pieces {
            dispatch!(
                cpu, run_piece, cpu, dims, inputs, saved, piece, kv_head, accumulate, gradients,
                scratch
            );
        }
    });
}

#[inline(always)]
#[allow(clippy::too_many_arguments)] // one piece of a whole op
fn run_piece<S: Simd>(
    simd: S,
    cpu: Cpu,
    dims: &AttentionDims<'_>,
    inputs: &Inputs<'_>,
    saved: &Saved<'_>,
    piece: &Piece,
    kv_head: usize,
    accumulate: bool,
    gradients: &Gradients<'_>,
    scratch: &mut [f32],
) {
    let padded = Padded::new(dims, piece.keys.len());
    let (e, e_pad) = (dims.head_dim, padded.head_dim);
    let [
        keys_t,
        values_t,
        keys,
        dk,
        dv,
        q,
        dout,
        dq,
        p,
        ds,
        lse,
        delta,
    ] = cut(scratch, tile_sizes(padded));
    let key_rows = piece.keys.clone();
    pack_columns(inputs.k, key_rows.clone(), kv_head, e, padded.len, keys_t);
    pack_columns(inputs.v, key_rows.clone(), kv_head, e, padded.len, values_t);
    pack_rows(inputs.k, key_rows.clone(), kv_head, e, e_pad, keys);
    dk.fill(0.0);
    dv.fill(0.0);

    let group = dims.heads / dims.kv_heads;
    for head in kv_head * group..(kv_head + 1) * group {
        for block in QueryBlock::all(dims, piece) {
            let first = piece.queries.start + block.queries.start;
            let queries = first..first + block.queries.len();
            pack_rows(inputs.q, queries.clone(), head, e, e_pad, q);
            pack_rows(saved.dout, queries.clone(), head, e, e_pad, dout);
            for (row, t) in queries.clone().enumerate() {
                let band = head * e..(head + 1) * e;
                lse[row] = saved.lse[t * dims.heads + head];
                delta[row] = dot_f64(
                    simd,
                    &saved.dout.row(t)[band.clone()],
                    &saved.out.row(t)[band],
                ) as f32;
            }
            dq.fill(0.0);
            for seen in block.key_blocks() {
                let (rows, terms) = (block.padded_rows(), block.queries.len());
                let columns = seen.len().next_multiple_of(COLUMNS);
                let diagonal = block.diagonal(&seen);
                let scores = Causal::Scores(diagonal);
                let tile = |data| Left {
                    data,
                    row: SCORES,
                    col: 1,
                };
                let turned = |data| Left {
                    data,
                    row: 1,
                    col: SCORES,
                };
                let by_head = |data| Left {
                    data,
                    row: e_pad,
                    col: 1,
                };
                let heads = |data| Right { data, row: e_pad };
                let columns_of = |data| Right {
                    data,
                    row: padded.len,
                };

                let out = Out {
                    data: p,
                    row: SCORES,
                    accumulate: false,
                };
                let right = columns_of(&keys_t[seen.start..]);
                product(cpu, (rows, columns, e), scores, by_head(q), right, out);
                let out = Out {
                    data: ds,
                    row: SCORES,
                    accumulate: false,
                };
                let right = columns_of(&values_t[seen.start..]);
                product(cpu, (rows, columns, e), scores, by_head(dout), right, out);

                score_gradients(
                    simd,
                    &block,
                    &seen,
                    columns,
                    dims.scale,
                    (lse, delta),
                    (p, ds),
                );

                let (shape, causal) = ((columns, e_pad, terms), Causal::Turned(diagonal));
                let at = seen.start * e_pad..;
                let out = Out {
                    data: &mut dv[at.clone()],
                    row: e_pad,
                    accumulate: true,
                };
                product(cpu, shape, causal, turned(p), heads(dout), out);
                let out = Out {
                    data: &mut dk[at.clone()],
                    row: e_pad,
                    accumulate: true,
                };
                product(cpu, shape, causal, turned(ds), heads(q), out);
                let out = Out {
                    data: dq,
                    row: e_pad,
                    accumulate: true,
                };
                let (shape, causal) = ((rows, e_pad, seen.len()), Causal::Left(diagonal));
                product(cpu, shape, causal, tile(ds), heads(&keys[at]), out);
            }
            unpack(dq, e_pad, accumulate, &gradients.dq, queries, head, e);
        }
    }
    for (from, to) in [(&*dk, &gradients.dk), (&*dv, &gradients.dv)] {
        unpack(from, e_pad, accumulate, to, key_rows.clone(), kv_head, e);
    }
}

/// From scores and dout . v to probabilities and score gradients, in place; zero where a query sees no key.
#[inline(always)]
fn score_gradients<S: Simd>(
    _: S,
    block: &QueryBlock,
    keys: &Range<usize>,
    columns: usize,
    scale: f32,
    (lse, delta): (&[f32], &[f32]),
    (p, ds): (&mut [f32], &mut [f32]),
) {
    for row in 0..block.padded_rows() {
        let seen = block.columns(row, keys);
        let (p, ds) = (
            &mut p[row * SCORES..][..columns],
            &mut ds[row * SCORES..][..columns],
        );
        for tile in [&mut *p, &mut *ds] {
            tile[..seen.start].fill(0.0);
            tile[seen.end..].fill(0.0);
        }
        if seen.is_empty() {
            continue;
        }
        let (lse, delta) = (lse[row], delta[row]);
        for (p, ds) in p[seen.clone()].iter_mut().zip(&mut ds[seen]) {
            *p = exp_below_88::<S>(fma::<S>(*p, scale, -lse));
            *ds = *p * (*ds - delta) * scale;
        }
    }
}

/// Writes one head of consecutive tokens back from its padded rows, or adds it.
#[inline(always)]
fn unpack(
    from: &[f32],
    padded: usize,
    accumulate: bool,
    to: &RowsMut<'_>,
    tokens: Range<usize>,
    head: usize,
    head_dim: usize,
) {
    for (t, from) in tokens.zip(from.chunks_exact(padded)) {
        // SAFETY: no other task has this token and head.
        let to = unsafe { to.band_shared(t, head * head_dim..(head + 1) * head_dim) };
        if accumulate {
            for (to, &from) in to.iter_mut().zip(from) {
                *to += from;
            }
        } else {
            copy(&from[..head_dim], to);
        }
    }
}

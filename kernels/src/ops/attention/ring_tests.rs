//! Ring attention: sequences cut over ranks, keys and values passed on from rank to rank.

use std::ops::Range;

use super::{AttentionDims, Gradients, Inputs, Saved, Span, backward, forward, reference};
use crate::testing::{all_cpus, assert_close, random, wide};
use crate::{Cpu, Rows, RowsMut};

/// Each sequence in 2 `ranks` chunks, of which rank r has r and 2 ranks - 1 - r.
struct Ring {
    /// First token of each sequence, and its chunks by index.
    sequences: Vec<(usize, Vec<Range<usize>>)>,
    ranks: usize,
}

impl Ring {
    fn new(lengths: &[usize], ranks: usize) -> Self {
        let (parts, mut start) = (2 * ranks, 0);
        let sequences = lengths
            .iter()
            .map(|&len| {
                let bound = |part: usize| part * len / parts;
                let chunks = (0..parts)
                    .map(|part| bound(part)..bound(part + 1))
                    .collect();
                start += len;
                (start - len, chunks)
            })
            .collect();
        Self { sequences, ranks }
    }

    /// Chunks of a rank: sequence, positions, and rows in the rank's own tensors.
    fn chunks(&self, rank: usize) -> Vec<(usize, Range<usize>, Range<usize>)> {
        let (mut row, mut chunks) = (0, Vec::new());
        for (index, (_, parts)) in self.sequences.iter().enumerate() {
            for part in [rank, 2 * self.ranks - 1 - rank] {
                let positions = parts[part].clone();
                row += positions.len();
                chunks.push((index, positions.clone(), row - positions.len()..row));
            }
        }
        chunks
    }

    /// Tokens of a rank, in the order of its rows.
    fn tokens(&self, rank: usize) -> Vec<usize> {
        let token = |(index, positions, _): (usize, Range<usize>, _)| {
            let start = self.sequences[index].0;
            positions.map(move |position| start + position)
        };
        self.chunks(rank).into_iter().flat_map(token).collect()
    }

    /// What rank `rank` has to do with the keys of rank `peer`.
    fn spans(&self, rank: usize, peer: usize) -> Vec<Span> {
        let mut spans = Vec::new();
        for (sequence, own, queries) in self.chunks(rank) {
            for (other, theirs, keys) in self.chunks(peer) {
                if sequence == other {
                    spans.push(Span {
                        queries: queries.clone(),
                        keys,
                        offset: own.start as isize - theirs.start as isize,
                    });
                }
            }
        }
        spans
    }
}

/// The rows of these tokens.
fn pick(x: &[f32], width: usize, tokens: &[usize]) -> Vec<f32> {
    let row = |&t: &usize| x[t * width..][..width].to_vec();
    tokens.iter().flat_map(row).collect()
}

/// The same, the other way.
fn place(from: &[f32], width: usize, tokens: &[usize], to: &mut [f32]) {
    for (row, &t) in from.chunks(width).zip(tokens) {
        to[t * width..][..width].copy_from_slice(row);
    }
}

fn check(cpu: Cpu, lengths: &[usize], ranks: usize, dims: AttentionDims<'_>) {
    let what = format!("{lengths:?} over {ranks}, {dims:?} {cpu:?}");
    let (q_width, kv_width) = (dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim);
    let total: usize = lengths.iter().sum();
    let (q, dout) = (random(1, total * q_width), random(2, total * q_width));
    let (k, v) = (random(3, total * kv_width), random(4, total * kv_width));

    let ring = Ring::new(lengths, ranks);
    let tokens: Vec<_> = (0..ranks).map(|rank| ring.tokens(rank)).collect();
    let own = |x: &[f32], width| -> Vec<Vec<f32>> {
        tokens.iter().map(|tokens| pick(x, width, tokens)).collect()
    };
    let (qs, ks, vs) = (own(&q, q_width), own(&k, kv_width), own(&v, kv_width));
    let douts = own(&dout, q_width);
    let inputs = |rank: usize, peer: usize| Inputs {
        q: Rows::contiguous(&qs[rank], q_width),
        k: Rows::contiguous(&ks[peer], kv_width),
        v: Rows::contiguous(&vs[peer], kv_width),
    };
    // Own keys first, then those of the rank before, and so on round the ring.
    let round = |rank: usize| (0..ranks).map(move |step| (rank + ranks - step) % ranks);

    let (mut out, mut lse) = (vec![f32::NAN; q.len()], vec![f32::NAN; total * dims.heads]);
    let (mut dq, mut dk, mut dv) = (
        vec![f32::NAN; q.len()],
        vec![0.0; k.len()],
        vec![0.0; v.len()],
    );
    for rank in 0..ranks {
        let mut my_out = vec![0.0; qs[rank].len()];
        let mut my_lse = vec![f32::NEG_INFINITY; tokens[rank].len() * dims.heads];
        let mut my_dq = vec![0.0; qs[rank].len()];
        for peer in round(rank) {
            let spans = ring.spans(rank, peer);
            let dims = AttentionDims {
                spans: &spans,
                ..dims
            };
            let mut scratch = vec![f32::NAN; dims.forward_scratch_len(cpu)];
            let out = RowsMut::contiguous(&mut my_out, q_width);
            forward(
                cpu,
                &dims,
                &inputs(rank, peer),
                true,
                out,
                &mut my_lse,
                &mut scratch,
            );
        }
        for peer in round(rank) {
            let spans = ring.spans(rank, peer);
            let dims = AttentionDims {
                spans: &spans,
                ..dims
            };
            let mut scratch = vec![f32::NAN; dims.backward_scratch_len(cpu)];
            let (mut their_dk, mut their_dv) = (
                pick(&dk, kv_width, &tokens[peer]),
                pick(&dv, kv_width, &tokens[peer]),
            );
            let saved = Saved {
                out: Rows::contiguous(&my_out, q_width),
                lse: &my_lse,
                dout: Rows::contiguous(&douts[rank], q_width),
            };
            let gradients = Gradients {
                dq: RowsMut::contiguous(&mut my_dq, q_width),
                dk: RowsMut::contiguous(&mut their_dk, kv_width),
                dv: RowsMut::contiguous(&mut their_dv, kv_width),
            };
            let inputs = inputs(rank, peer);
            backward(cpu, &dims, &inputs, &saved, true, gradients, &mut scratch);
            place(&their_dk, kv_width, &tokens[peer], &mut dk);
            place(&their_dv, kv_width, &tokens[peer], &mut dv);
        }
        place(&my_out, q_width, &tokens[rank], &mut out);
        place(&my_lse, dims.heads, &tokens[rank], &mut lse);
        place(&my_dq, q_width, &tokens[rank], &mut dq);
    }

    let starts: Vec<usize> = std::iter::once(0)
        .chain(lengths.iter().scan(0, |end, len| {
            *end += len;
            Some(*end)
        }))
        .collect();
    let spans = Span::packed(&starts);
    let whole = AttentionDims {
        spans: &spans,
        ..dims
    };
    let (q, k, v, dout) = (wide(&q), wide(&k), wide(&v), wide(&dout));
    let (out_ref, lse_ref) = reference::forward(&whole, &q, &k, &v);
    assert_close(&format!("out {what}"), &out, &out_ref, 2e-6);
    assert_close(&format!("lse {what}"), &lse, &lse_ref, 2e-6);
    let (dq_ref, dk_ref, dv_ref) = reference::backward(&whole, &q, &k, &v, &dout);
    assert_close(&format!("dq {what}"), &dq, &dq_ref, 2e-6);
    assert_close(&format!("dk {what}"), &dk, &dk_ref, 2e-6);
    assert_close(&format!("dv {what}"), &dv, &dv_ref, 2e-6);
}

#[test]
fn sequences_cut_over_ranks_equal_the_whole() {
    let dims = |heads, kv_heads, head_dim: usize, window| AttentionDims {
        spans: &[],
        heads,
        kv_heads,
        head_dim,
        scale: (head_dim as f32).sqrt().recip(),
        window,
    };
    for cpu in all_cpus() {
        for ranks in [1, 2, 3, 4] {
            // Chunks of unlike lengths, some of them empty.
            check(cpu, &[3, 0, 1, 29], ranks, dims(4, 2, 3, None));
            check(cpu, &[3, 0, 1, 29], ranks, dims(2, 1, 16, Some(5)));
            check(cpu, &[7, 301], ranks, dims(2, 2, 20, Some(40)));
            check(cpu, &[310], ranks, dims(3, 1, 64, None));
        }
    }
}

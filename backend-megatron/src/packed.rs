//! A micro-batch as this rank's modules see it: its tokens end to end, positions, and which rows the head scores.

use std::ops::Range;

use drivetrain_core::{batch::Batch, moe::CountedTokens, plan::share};
use drivetrain_kernels::ops::attention::Span;

use crate::context_parallel::{ContextShape, Piece};

/// What a rank has of one micro-batch: T tokens, of all ranks' [`Self::all_tokens`].
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Packed {
    /// Token ids, `[T]`, each below V.
    pub(crate) tokens: Vec<u32>,
    /// Position within its sequence, `[T]`.
    pub(crate) positions: Vec<u32>,
    /// What each context rank has of the sequences.
    pub(crate) pieces: Vec<Vec<Piece>>,
    /// How many of the T rows each tensor rank has where they are split.
    pub(crate) shares: Vec<usize>,
    /// Index in the micro-batch of each token that this rank scores, `[N]`.
    pub(crate) scored: Vec<usize>,
    /// The row whose hidden state predicts it: that of the token before, `[N]`.
    pub(crate) rows: Vec<u32>,
    /// How many of the N rows each tensor rank has where they are split.
    pub(crate) scored_shares: Vec<usize>,
    /// Its id, `[N]`.
    pub(crate) targets: Vec<u32>,
    /// Which of its rows routers count, `[T]`, and the counted sequences, whole.
    pub(crate) counted: CountedTokens,
    /// Whether any rank scores any token.
    pub(crate) any_scored: bool,
    /// Tokens of the whole micro-batch.
    pub(crate) all_tokens: usize,
}

impl Packed {
    /// A micro-batch of which the tokens in `scored` (never a sequence's first) are scored.
    pub(crate) fn new(
        microbatch: &Batch,
        scored: &[bool],
        context: ContextShape,
        tensor_ranks: usize,
    ) -> Self {
        let (all, starts) = (microbatch.tokens(), microbatch.starts());
        let pieces = context.cut(starts);
        let own = &pieces[context.index];
        let tokens: Vec<u32> = own.iter().flat_map(|p| &all[p.tokens()]).copied().collect();
        // A row scores the token that follows it in its sequence.
        let follows = own.iter().flat_map(|piece| {
            let end = starts[piece.sequence + 1];
            let next = piece.tokens().map(|t| t + 1).zip(piece.rows.clone());
            next.filter(move |(t, _)| *t < end && scored[*t])
        });
        let (scored_here, rows): (Vec<usize>, Vec<u32>) =
            follows.map(|(t, row)| (t, row as u32)).unzip();
        let shares: Vec<_> = (0..tensor_ranks)
            .map(|r| share(tokens.len(), tensor_ranks, r))
            .collect();
        let counted = CountedTokens::new(microbatch);
        let within = |range: &Range<usize>| {
            let below = |end| rows.partition_point(|&row| (row as usize) < end);
            below(range.end) - below(range.start)
        };
        Self {
            scored_shares: shares.iter().map(within).collect(),
            shares: shares.iter().map(Range::len).collect(),
            targets: scored_here.iter().map(|&t| all[t]).collect(),
            positions: own.iter().flat_map(Piece::positions).collect(),
            any_scored: scored.contains(&true),
            counted: CountedTokens {
                sequence: own
                    .iter()
                    .flat_map(|p| &counted.sequence[p.tokens()])
                    .copied()
                    .collect(),
                lengths: counted.lengths,
            },
            all_tokens: all.len(),
            scored: scored_here,
            rows,
            pieces,
            tokens,
        }
    }

    /// T.
    pub(crate) fn num_tokens(&self) -> usize {
        self.tokens.len()
    }

    /// N.
    pub(crate) fn num_scored(&self) -> usize {
        self.scored.len()
    }

    /// A bound on the positions.
    pub(crate) fn num_positions(&self) -> usize {
        self.positions.iter().max().map_or(0, |&p| p as usize + 1)
    }

    /// Tokens of a context rank.
    pub(crate) fn tokens_of(&self, context: usize) -> usize {
        self.pieces[context].last().map_or(0, |p| p.rows.end)
    }

    /// What the queries of context rank `queries` see of the keys of `keys`.
    pub(crate) fn spans(&self, queries: usize, keys: usize) -> Vec<Span> {
        let mut spans = Vec::new();
        let mut first = 0;
        for q in &self.pieces[queries] {
            // Pieces come by sequence on every rank.
            first += self.pieces[keys][first..]
                .iter()
                .take_while(|k| k.sequence < q.sequence)
                .count();
            let same = self.pieces[keys][first..]
                .iter()
                .take_while(|k| k.sequence == q.sequence);
            spans.extend(
                same.filter(|k| k.start < q.start + q.rows.len())
                    .map(|k| Span {
                        queries: q.rows.clone(),
                        keys: k.rows.clone(),
                        offset: q.start as isize - k.start as isize,
                    }),
            );
        }
        spans
    }

    /// Spreads a value a scored token over all tokens of the micro-batch, 0 elsewhere.
    pub(crate) fn spread(&self, values: impl IntoIterator<Item = f32>) -> Vec<f64> {
        let mut all = vec![0.0; self.all_tokens];
        for (&t, value) in self.scored.iter().zip(values) {
            all[t] = f64::from(value);
        }
        all
    }

    /// The values of this rank's scored tokens, `[N]`, among those of the micro-batch.
    pub(crate) fn gather(&self, values: &[f64]) -> Vec<f32> {
        self.scored.iter().map(|&t| values[t] as f32).collect()
    }
}

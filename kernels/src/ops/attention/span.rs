//! Which queries meet which keys: spans, cut down to what is seen, and grouped so that threads share no row.

use std::ops::Range;

use super::AttentionDims;
use crate::Cpu;

/// A run of queries against a run of keys of the same sequence. Positions rise by 1 in both.
///
/// A query at position i sees a key at position j if 0 <= i - j, and with a window w if i - j < w.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// Rows of q.
    pub queries: Range<usize>,
    /// Rows of k and v.
    pub keys: Range<usize>,
    /// Position of the first query minus position of the first key.
    pub offset: isize,
}

impl Span {
    /// A whole sequence that holds the same rows of q, k and v.
    pub fn causal(tokens: Range<usize>) -> Self {
        Self {
            queries: tokens.clone(),
            keys: tokens,
            offset: 0,
        }
    }

    /// Whole sequences end to end: `cu_seqlens` holds their starts and the end of the last `[B + 1]`.
    ///
    /// # Panics
    /// If the starts fall.
    #[track_caller]
    pub fn packed(cu_seqlens: &[usize]) -> Vec<Self> {
        assert!(
            cu_seqlens.is_sorted(),
            "attention: cu_seqlens must not fall, found {cu_seqlens:?}"
        );
        cu_seqlens
            .windows(2)
            .map(|ends| Self::causal(ends[0]..ends[1]))
            .collect()
    }

    /// What is left without the keys that no query sees and the queries that see no key.
    pub(super) fn seen(&self, window: Option<usize>) -> Option<Piece> {
        let window = isize::try_from(window.unwrap_or(usize::MAX)).unwrap_or(isize::MAX);
        let (num_queries, num_keys) = (self.queries.len() as isize, self.keys.len() as isize);
        // Positions, that of the first key being 0.
        let end = self.offset.saturating_add(num_queries);
        let first_query = self.offset.max(0);
        let end_query = end.min((num_keys - 1).saturating_add(window));
        let first_key = (self.offset.saturating_sub(window - 1)).clamp(0, num_keys);
        let end_key = end.clamp(0, num_keys);
        if first_query >= end_query || first_key >= end_key {
            return None;
        }
        let query_row = |position: isize| self.queries.start + (position - self.offset) as usize;
        let key_row = |position: isize| self.keys.start + position as usize;
        Some(Piece {
            queries: query_row(first_query)..query_row(end_query),
            keys: key_row(first_key)..key_row(end_key),
            lead: (first_query - first_key) as usize,
        })
    }
}

/// A span in which every query sees a key and every key is seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) queries: Range<usize>,
    pub(super) keys: Range<usize>,
    /// Position of the first query minus position of the first key.
    pub(super) lead: usize,
}

impl Piece {
    /// Pairs of a query and a key it sees.
    pub(super) fn pairs(&self, window: Option<usize>) -> f64 {
        let window = window.unwrap_or(usize::MAX);
        (self.lead..self.lead + self.queries.len())
            .map(|query| {
                let end = (query + 1).min(self.keys.len());
                (end - (query + 1).saturating_sub(window)) as f64
            })
            .sum()
    }
}

/// The pieces of all spans, in groups that write no row in common.
pub(super) struct Groups {
    /// Within a group in the order of the spans.
    pieces: Vec<Piece>,
    groups: Vec<Range<usize>>,
}

impl Groups {
    /// For a pass that writes rows of queries, and of keys too if `write_keys`.
    pub(super) fn new(dims: &AttentionDims<'_>, write_keys: bool) -> Self {
        let pieces: Vec<Piece> = dims.pieces().collect();
        let mut roots: Vec<usize> = (0..pieces.len()).collect();
        join(&mut roots, |i| &pieces[i].queries);
        if write_keys {
            join(&mut roots, |i| &pieces[i].keys);
        }
        let mut order: Vec<usize> = (0..pieces.len()).collect();
        order.sort_by_key(|&i| root(&roots, i));
        let mut groups: Vec<Range<usize>> = Vec::new();
        for (at, &i) in order.iter().enumerate() {
            match groups.last_mut() {
                Some(group) if root(&roots, order[group.start]) == root(&roots, i) => {
                    group.end = at + 1;
                }
                _ => groups.push(at..at + 1),
            }
        }
        Self {
            pieces: order.iter().map(|&i| pieces[i].clone()).collect(),
            groups,
        }
    }

    /// Calls `f(worker, pieces of a group, kv_head)` for all pairs of a group and a key/value head.
    pub(super) fn for_tasks(
        &self,
        cpu: Cpu,
        kv_heads: usize,
        f: impl Fn(usize, &[Piece], usize) + Sync,
    ) {
        cpu.for_tasks(self.groups.len() * kv_heads, |worker, task| {
            let group = self.groups[task / kv_heads].clone();
            f(worker, &self.pieces[group], task % kv_heads);
        });
    }

    /// Runs of the rows below `len` that lie in no piece.
    pub(super) fn gaps(
        &self,
        rows: impl Fn(&Piece) -> &Range<usize>,
        len: usize,
    ) -> Vec<Range<usize>> {
        let mut covered: Vec<&Range<usize>> = self.pieces.iter().map(rows).collect();
        covered.sort_by_key(|rows| rows.start);
        let (mut gaps, mut end) = (Vec::new(), 0);
        for rows in covered.into_iter().chain([&(len..len)]) {
            if rows.start > end {
                gaps.push(end..rows.start);
            }
            end = end.max(rows.end);
        }
        gaps
    }
}

/// The smallest index of the group of `i`.
fn root(roots: &[usize], mut i: usize) -> usize {
    while roots[i] != i {
        i = roots[i];
    }
    i
}

/// Joins the groups of all indices whose ranges overlap.
fn join<'a>(roots: &mut [usize], range: impl Fn(usize) -> &'a Range<usize>) {
    let mut order: Vec<usize> = (0..roots.len()).collect();
    order.sort_by_key(|&i| range(i).start);
    let (mut first, mut end) = (0, 0);
    for i in order {
        if range(i).start < end {
            let (a, b) = (root(roots, first), root(roots, i));
            roots[a.max(b)] = a.min(b);
        } else {
            first = i;
        }
        end = end.max(range(i).end);
    }
}

/// Panics if two of the ranges overlap: each row is written by one span at most.
#[track_caller]
pub(super) fn check_disjoint<'a>(what: &str, ranges: impl Iterator<Item = &'a Range<usize>>) {
    let mut ranges: Vec<_> = ranges.filter(|range| !range.is_empty()).collect();
    ranges.sort_by_key(|range| range.start);
    for pair in ranges.windows(2) {
        assert!(
            pair[0].end <= pair[1].start,
            "attention: {what} {:?} and {:?} of two spans overlap, which only merging or accumulating allows",
            pair[0],
            pair[1]
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dims<'a>(spans: &'a [Span], window: Option<usize>) -> AttentionDims<'a> {
        AttentionDims {
            spans,
            heads: 1,
            kv_heads: 1,
            head_dim: 1,
            scale: 1.0,
            window,
        }
    }

    #[test]
    fn a_piece_holds_just_what_is_seen() {
        for (queries, keys) in [(0, 3), (3, 0), (1, 1), (4, 7), (7, 4), (5, 5)] {
            for window in [None, Some(1), Some(3), Some(100)] {
                for offset in -9..=12isize {
                    let span = Span {
                        queries: 10..10 + queries,
                        keys: 20..20 + keys,
                        offset,
                    };
                    let sees = |q: usize, k: usize| {
                        let back = q as isize + offset - k as isize;
                        back >= 0 && window.is_none_or(|w| back < w as isize)
                    };
                    let pairs: Vec<_> = (0..queries)
                        .flat_map(|q| (0..keys).map(move |k| (q, k)))
                        .filter(|&(q, k)| sees(q, k))
                        .collect();
                    let Some(piece) = span.seen(window) else {
                        assert!(pairs.is_empty(), "{span:?} {window:?}");
                        continue;
                    };
                    let bounds = |row: fn(&(usize, usize)) -> usize| {
                        let rows = pairs.iter().map(row);
                        rows.clone().min().unwrap()..rows.max().unwrap() + 1
                    };
                    let (q, k) = (bounds(|p| p.0), bounds(|p| p.1));
                    assert_eq!(
                        piece.queries,
                        10 + q.start..10 + q.end,
                        "{span:?} {window:?}"
                    );
                    assert_eq!(piece.keys, 20 + k.start..20 + k.end, "{span:?} {window:?}");
                    let lead = q.start as isize + offset - k.start as isize;
                    assert_eq!(piece.lead as isize, lead);
                    assert_eq!(piece.pairs(window), pairs.len() as f64);
                }
            }
        }
    }

    #[test]
    fn groups_share_no_rows_and_keep_the_order() {
        let span = |queries: Range<usize>, keys: Range<usize>| Span {
            queries,
            keys,
            offset: 100,
        };
        let spans = [
            span(10..20, 0..5),
            span(0..10, 5..10),
            span(15..30, 20..25),
            span(0..4, 24..30),
            span(40..41, 40..41),
        ];
        let found = |write_keys| {
            let groups = Groups::new(&dims(&spans, None), write_keys);
            let starts = |group: &Range<usize>| -> Vec<usize> {
                let pieces = &groups.pieces[group.clone()];
                pieces.iter().map(|piece| piece.keys.start).collect()
            };
            groups.groups.iter().map(starts).collect::<Vec<_>>()
        };
        assert_eq!(found(false), [vec![0, 20], vec![5, 24], vec![40]]);
        assert_eq!(found(true), [vec![0, 5, 20, 24], vec![40]]);
        let groups = Groups::new(&dims(&spans, None), true);
        assert_eq!(groups.gaps(|p| &p.queries, 50), [30..40, 41..50]);
        assert_eq!(groups.gaps(|p| &p.keys, 41), [10..20, 30..40]);
        assert_eq!(
            Groups::new(&dims(&[], None), true).gaps(|p| &p.keys, 2),
            [0..2]
        );
    }
}

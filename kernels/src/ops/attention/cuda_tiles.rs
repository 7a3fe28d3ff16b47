//! Spans cut into tiles: what a block has and what it meets.

use std::ops::Range;

use crate::cuda::{Buffer, CudaError, Device, count};
use crate::ops::attention::Span;

/// Tiles that write no row in common, on the device.
#[derive(Debug)]
pub(super) struct Wave {
    pub(super) tiles: Buffer<u32>,
    pub(super) count: u32,
}

/// Rows of one side and the rows of the other that they meet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tile {
    row: u32,
    pub(super) rows: u32,
    other: u32,
    others: u32,
    /// Position of the first query minus position of the first key.
    lead: i32,
}

impl Tile {
    /// `None` where they meet nothing.
    fn new(rows: Range<usize>, others: Range<usize>, lead: isize) -> Option<Self> {
        if rows.is_empty() || others.is_empty() {
            return None;
        }
        Some(Self {
            row: count("row", rows.start),
            rows: count("rows", rows.len()),
            other: count("row", others.start),
            others: count("rows", others.len()),
            lead: i32::try_from(lead).expect("positions of a sequence fit 32 bits"),
        })
    }
}

/// The keys that the queries `from`..`to` of a span see, tile by tile.
pub(super) fn query_tiles(span: &Span, window: u32, height: usize) -> Vec<Tile> {
    let (num_queries, num_keys) = (span.queries.len(), span.keys.len() as i128);
    let starts = (0..num_queries).step_by(height);
    let tile = |from: usize| {
        let to = (from + height).min(num_queries);
        let (first, last) = (
            from as i128 + span.offset as i128,
            to as i128 - 1 + span.offset as i128,
        );
        // The key at position j is seen by the query at i if 0 <= i - j < window.
        let start = (first - i128::from(window) + 1).clamp(0, num_keys) as usize;
        let end = (last + 1).clamp(0, num_keys) as usize;
        let keys = span.keys.start + start..span.keys.start + end.max(start);
        let rows = span.queries.start + from..span.queries.start + to;
        Tile::new(rows, keys, (first - start as i128) as isize)
    };
    starts.filter_map(tile).collect()
}

/// The queries that see the keys of a span, tile by tile of keys.
pub(super) fn key_tiles(span: &Span, window: u32, height: usize) -> Vec<Tile> {
    let (num_queries, num_keys) = (span.queries.len() as i128, span.keys.len());
    let starts = (0..num_keys).step_by(height);
    let tile = |from: usize| {
        let to = (from + height).min(num_keys);
        let offset = span.offset as i128;
        let start = (from as i128 - offset).clamp(0, num_queries) as usize;
        let end = (to as i128 - 1 + i128::from(window) - offset).clamp(0, num_queries) as usize;
        let queries = span.queries.start + start..span.queries.start + end.max(start);
        let rows = span.keys.start + from..span.keys.start + to;
        Tile::new(
            rows,
            queries,
            (start as i128 + offset - from as i128) as isize,
        )
    };
    starts.filter_map(tile).collect()
}

/// The tiles of all spans, in as few waves as keep spans that share rows apart and in their order. Within a wave
/// the longest first, so that the last blocks to start are short.
pub(super) fn waves(
    spans: &[Span],
    written: impl Fn(&Span) -> Range<usize>,
    tiles: impl Fn(&Span) -> Vec<Tile>,
) -> Vec<Vec<Tile>> {
    let mut waves: Vec<Vec<Tile>> = Vec::new();
    let mut placed: Vec<(Range<usize>, usize)> = Vec::new();
    for span in spans {
        let tiles = tiles(span);
        if tiles.is_empty() {
            continue;
        }
        let rows = written(span);
        let shares = |other: &Range<usize>| rows.start < other.end && other.start < rows.end;
        let before = placed
            .iter()
            .filter(|(other, _)| shares(other))
            .map(|(_, wave)| wave + 1);
        let wave = before.max().unwrap_or(0);
        placed.push((rows, wave));
        waves.resize(waves.len().max(wave + 1), Vec::new());
        waves[wave].extend(tiles);
    }
    for wave in &mut waves {
        wave.sort_by_key(|tile| std::cmp::Reverse(tile.others));
    }
    waves
}

pub(super) fn upload(device: &Device, waves: Vec<Vec<Tile>>) -> Result<Vec<Wave>, CudaError> {
    let wave = |tiles: Vec<Tile>| {
        let words: Vec<u32> = tiles
            .iter()
            .flat_map(|tile| {
                [
                    tile.row,
                    tile.rows,
                    tile.other,
                    tile.others,
                    tile.lead as u32,
                ]
            })
            .collect();
        Ok(Wave {
            tiles: device.upload(&words)?,
            count: count("tiles", tiles.len()),
        })
    };
    waves.into_iter().map(wave).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pairs of a query and a key of a span, by the definition.
    fn pairs(span: &Span, window: u32) -> Vec<(usize, usize)> {
        let mut pairs = Vec::new();
        for (q, query) in span.queries.clone().enumerate() {
            for (k, key) in span.keys.clone().enumerate() {
                let back = q as i64 + span.offset as i64 - k as i64;
                if (0..i64::from(window)).contains(&back) {
                    pairs.push((query, key));
                }
            }
        }
        pairs
    }

    #[test]
    fn tiles_of_both_sides_hold_every_pair_once_and_know_their_positions() {
        let spans = [
            Span::causal(3..40),
            Span {
                queries: 5..9,
                keys: 2..60,
                offset: 50,
            },
            Span {
                queries: 0..50,
                keys: 7..20,
                offset: -3,
            },
            Span {
                queries: 0..20,
                keys: 0..20,
                offset: 100,
            },
            Span {
                queries: 0..4,
                keys: 4..9,
                offset: -20,
            },
            Span {
                queries: 2..2,
                keys: 0..5,
                offset: 0,
            },
        ];
        for span in &spans {
            for window in [u32::MAX, 1, 7, 48] {
                for by_query in [true, false] {
                    let tiles = match by_query {
                        true => query_tiles(span, window, 8),
                        false => key_tiles(span, window, 8),
                    };
                    let mut found = Vec::new();
                    for tile in &tiles {
                        for row in 0..tile.rows {
                            for other in 0..tile.others {
                                let (q, k) = if by_query { (row, other) } else { (other, row) };
                                let back = i64::from(tile.lead) + i64::from(q) - i64::from(k);
                                if (0..i64::from(window)).contains(&back) {
                                    let (row, other) = (tile.row + row, tile.other + other);
                                    let pair = if by_query { (row, other) } else { (other, row) };
                                    found.push((pair.0 as usize, pair.1 as usize));
                                }
                            }
                        }
                    }
                    found.sort_unstable();
                    assert_eq!(found, pairs(span, window), "{span:?} {window} {by_query}");
                }
            }
        }
    }

    #[test]
    fn what_is_out_of_sight_is_not_visited() {
        // The first tile of 8 queries sees 8 keys, the second 16 or, with a window of 4, 11.
        let others =
            |tiles: Vec<Tile>| -> Vec<u32> { tiles.iter().map(|tile| tile.others).collect() };
        let span = Span::causal(0..16);
        assert_eq!(others(query_tiles(&span, u32::MAX, 8)), [8, 16]);
        assert_eq!(others(query_tiles(&span, 4, 8)), [8, 11]);
        assert_eq!(others(key_tiles(&span, u32::MAX, 8)), [16, 8]);
        assert_eq!(others(key_tiles(&span, 4, 8)), [11, 8]);
    }

    #[test]
    fn spans_that_share_rows_follow_each_other() {
        let spans = [
            Span::causal(0..8),
            Span::causal(8..12),
            Span {
                queries: 4..10,
                keys: 0..4,
                offset: 9,
            },
        ];
        let of = |waves: Vec<Vec<Tile>>| -> Vec<Vec<u32>> {
            waves
                .iter()
                .map(|wave| wave.iter().map(|tile| tile.row).collect())
                .collect()
        };
        let by_query = waves(
            &spans,
            |s| s.queries.clone(),
            |s| query_tiles(s, u32::MAX, 8),
        );
        assert_eq!(of(by_query), [vec![0, 8], vec![4]]);
        let by_key = waves(&spans, |s| s.keys.clone(), |s| key_tiles(s, u32::MAX, 8));
        assert_eq!(of(by_key), [vec![0, 8], vec![0]]);
    }
}

//! Runs of a flattened tensor, written short: equal runs at equal distances are one entry.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// `count` runs of `len` elements, `stride` apart. As JSON `[start, len, stride, count]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Strided(usize, usize, usize, usize);

impl Strided {
    fn iter(self) -> impl Iterator<Item = Range<usize>> {
        let Self(start, len, stride, count) = self;
        (0..count).map(move |i| start + i * stride..start + i * stride + len)
    }

    /// Number of elements and where the last run ends; `None` for what no writer of ours makes.
    fn extent(self) -> Option<(usize, usize)> {
        let Self(start, len, stride, count) = self;
        if len == 0 || count == 0 || (count > 1 && stride < len) {
            return None;
        }
        let end = stride
            .checked_mul(count - 1)?
            .checked_add(start)?
            .checked_add(len)?;
        Some((len.checked_mul(count)?, end))
    }
}

/// Shortens runs that are in order, not empty and do not overlap.
pub(super) fn shorten(runs: &[Range<usize>]) -> Vec<Strided> {
    let mut merged: Vec<Range<usize>> = Vec::new();
    for run in runs {
        match merged.last_mut() {
            Some(last) if last.end == run.start => last.end = run.end,
            _ => merged.push(run.clone()),
        }
    }
    let mut short: Vec<Strided> = Vec::new();
    for run in merged {
        if let Some(Strided(start, len, stride, count)) = short.last_mut()
            && *len == run.len()
            && (*count == 1 || run.start == *start + *stride * *count)
        {
            if *count == 1 {
                *stride = run.start - *start;
            }
            *count += 1;
            continue;
        }
        short.push(Strided(run.start, run.len(), run.len(), 1));
    }
    short
}

/// The runs in full.
pub(super) fn expand(short: &[Strided]) -> impl Iterator<Item = Range<usize>> {
    short.iter().flat_map(|s| s.iter())
}

/// Number of elements of runs that lie in order within `0..limit`; `None` if they do not.
pub(super) fn num_elements(short: &[Strided], limit: usize) -> Option<usize> {
    let (mut total, mut last) = (0usize, 0);
    for strided in short {
        let (count, end) = strided.extent()?;
        if strided.0 < last || end > limit {
            return None;
        }
        last = end;
        total = total.checked_add(count)?;
    }
    Some(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortened_runs_expand_to_the_same_elements() {
        let columns: Vec<_> = (0..100).map(|row| row * 10 + 2..row * 10 + 5).collect();
        let short = shorten(&columns);
        assert_eq!(short, [Strided(2, 3, 10, 100)]);
        assert_eq!(expand(&short).collect::<Vec<_>>(), columns);
        assert_eq!(num_elements(&short, 1000), Some(300));
        assert_eq!(num_elements(&short, 994), None);
        assert_eq!(shorten(&[0..4, 4..9]), [Strided(0, 9, 9, 1)]);
        let odd = [0..1, 5..6, 7..8, 9..10, 20..22];
        assert_eq!(expand(&shorten(&odd)).collect::<Vec<_>>(), odd);
        assert!(shorten(&[]).is_empty());
    }

    #[test]
    fn hostile_runs_are_refused() {
        let (max, limit) = (usize::MAX, 100);
        for strided in [
            Strided(0, 0, 0, 1),
            Strided(0, 1, 1, 0),
            Strided(0, 2, 1, 2),
            Strided(0, 1, max, 3),
            Strided(max, 2, 2, 1),
            Strided(0, 1, 1, max),
        ] {
            assert_eq!(num_elements(&[strided], limit), None, "{strided:?}");
        }
        assert_eq!(
            num_elements(&[Strided(5, 1, 1, 1), Strided(4, 1, 1, 1)], limit),
            None
        );
    }
}

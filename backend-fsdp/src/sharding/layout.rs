//! Where each rank's part of a unit lies: every parameter is cut along dim 0, as `torch.chunk` cuts.

use std::ops::Range;

use drivetrain_core::model::ParameterSpec;

/// The rows of `num_rows` that `rank` of `num_ranks` holds: chunks of `ceil(num_rows / num_ranks)`, so that the
/// last ranks may hold fewer, or none.
pub(crate) fn shard_rows(num_rows: usize, num_ranks: usize, rank: usize) -> Range<usize> {
    let chunk = num_rows.div_ceil(num_ranks.max(1));
    (rank * chunk).min(num_rows)..((rank + 1) * chunk).min(num_rows)
}

/// The parameters of a unit, end to end: whole in the gathered buffer, cut in each rank's shard.
#[derive(Debug, Clone)]
pub(crate) struct UnitLayout {
    specs: Vec<ParameterSpec>,
    full: Vec<Range<usize>>,
    shards: Vec<Vec<Range<usize>>>,
}

impl UnitLayout {
    /// Lays out a unit's parameters in this order.
    pub(crate) fn new(specs: Vec<ParameterSpec>, num_ranks: usize) -> Self {
        let end_to_end = |lengths: Vec<usize>| {
            let mut at = 0;
            lengths
                .into_iter()
                .map(|len| {
                    at += len;
                    at - len..at
                })
                .collect::<Vec<_>>()
        };
        let full = end_to_end(specs.iter().map(ParameterSpec::num_elements).collect());
        let shards = (0..num_ranks)
            .map(|rank| {
                let part = |spec| shard_elements(spec, num_ranks, rank).len();
                end_to_end(specs.iter().map(part).collect())
            })
            .collect();
        Self {
            specs,
            full,
            shards,
        }
    }

    /// The parameters.
    pub(crate) fn specs(&self) -> &[ParameterSpec] {
        &self.specs
    }

    /// Number of ranks it is cut for.
    pub(crate) fn num_ranks(&self) -> usize {
        self.shards.len()
    }

    /// Elements of the whole unit.
    pub(crate) fn full_len(&self) -> usize {
        self.full.last().map_or(0, |r| r.end)
    }

    /// Where a parameter lies in the gathered unit.
    pub(crate) fn full(&self, parameter: usize) -> Range<usize> {
        self.full[parameter].clone()
    }

    /// Elements of a rank's shard.
    pub(crate) fn shard_len(&self, rank: usize) -> usize {
        self.shards[rank].last().map_or(0, |r| r.end)
    }

    /// Elements of every rank's shard.
    pub(crate) fn shard_lens(&self) -> Vec<usize> {
        (0..self.num_ranks()).map(|r| self.shard_len(r)).collect()
    }

    /// Where a rank's part of a parameter lies in its shard.
    pub(crate) fn shard(&self, rank: usize, parameter: usize) -> Range<usize> {
        self.shards[rank][parameter].clone()
    }

    /// Which elements of the flattened parameter that part is.
    pub(crate) fn elements(&self, rank: usize, parameter: usize) -> Range<usize> {
        shard_elements(&self.specs[parameter], self.num_ranks(), rank)
    }

    /// Which rows of the parameter that part is.
    pub(crate) fn rows(&self, rank: usize, parameter: usize) -> Range<usize> {
        shard_rows(num_rows(&self.specs[parameter]), self.num_ranks(), rank)
    }
}

fn num_rows(spec: &ParameterSpec) -> usize {
    spec.shape.first().copied().unwrap_or(1)
}

fn shard_elements(spec: &ParameterSpec, num_ranks: usize, rank: usize) -> Range<usize> {
    let width: usize = spec.shape.iter().skip(1).product();
    let rows = shard_rows(num_rows(spec), num_ranks, rank);
    rows.start * width..rows.end * width
}

#[cfg(test)]
mod tests {
    use drivetrain_core::{DType, model::ParameterKind};

    use super::*;

    fn spec(name: &str, shape: &[usize]) -> ParameterSpec {
        ParameterSpec {
            name: name.to_owned(),
            shape: shape.to_vec(),
            kind: ParameterKind::ColumnLinear,
            layer: None,
            expert: None,
            dtype: DType::F32,
        }
    }

    #[test]
    fn rows_are_cut_as_torch_chunk_cuts() {
        let cut = |n, ranks| {
            (0..ranks)
                .map(|r| shard_rows(n, ranks, r))
                .collect::<Vec<_>>()
        };
        assert_eq!(cut(97, 4), [0..25, 25..50, 50..75, 75..97]);
        assert_eq!(cut(5, 4), [0..2, 2..4, 4..5, 5..5]);
        assert_eq!(cut(1, 3), [0..1, 1..1, 1..1]);
        assert_eq!(cut(0, 2), [0..0, 0..0]);
    }

    #[test]
    fn shards_cover_every_element_once() {
        for ranks in 1..6 {
            let specs = vec![spec("a", &[97, 3]), spec("b", &[5]), spec("c", &[2, 4])];
            let layout = UnitLayout::new(specs, ranks);
            assert_eq!(layout.full_len(), 97 * 3 + 5 + 8);
            assert_eq!(layout.shard_lens().iter().sum::<usize>(), layout.full_len());
            for p in 0..3 {
                let mut at = 0;
                for rank in 0..ranks {
                    let elements = layout.elements(rank, p);
                    assert!(elements.is_empty() || elements.start == at);
                    assert_eq!(elements.len(), layout.shard(rank, p).len());
                    at += elements.len();
                }
                assert_eq!(at, layout.full(p).len());
            }
        }
    }
}

//! Where each parameter lies in the buckets: fused tensors are neighbours, so no weight is ever copied to be
//! multiplied.

use std::{collections::BTreeMap, ops::Range};

use drivetrain_core::{Error, ErrorKind, Result, model::ParameterSpec, plan::Holding};

/// A tensor of the engine: neighbouring elements of a bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TensorRef {
    /// Which bucket.
    pub(crate) bucket: usize,
    /// Where in it.
    pub(crate) range: Range<usize>,
}

/// What a rank holds of one parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Part {
    /// Index among `ModelSpec::parameters`.
    pub(crate) parameter: usize,
    /// Where in the bucket.
    pub(crate) range: Range<usize>,
    /// The same elements in the flattened parameter, run after run.
    pub(crate) runs: Vec<Range<usize>>,
    /// Which of the layout's groups holds them.
    pub(crate) group: usize,
    /// Whether another rank of the group computes the very same gradient, which counts once.
    pub(crate) redundant: bool,
}

/// Tensors that backward completes together: those of one block, say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bucket {
    parts: Vec<Part>,
    len: usize,
}

/// Neighbours in a bucket that the same ranks hold: reduced, updated and gathered as one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Region {
    /// Which bucket.
    pub(crate) bucket: usize,
    /// Where in it.
    pub(crate) range: Range<usize>,
    /// Which of the layout's groups holds them.
    pub(crate) group: usize,
}

/// All buckets of a rank.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Layout {
    parameters: Vec<ParameterSpec>,
    buckets: Vec<Bucket>,
    regions: Vec<Region>,
    groups: Vec<Vec<usize>>,
    /// Bucket and part of each parameter that the rank holds.
    places: BTreeMap<usize, (usize, usize)>,
}

/// Places tensors one after the other.
#[derive(Debug)]
pub(crate) struct LayoutBuilder {
    parameters: Vec<ParameterSpec>,
    /// What is held and not placed yet, by name.
    held: BTreeMap<String, Holding>,
    /// World ranks, in the order of their lists: every rank makes the groups it is in in the same order.
    groups: Vec<Vec<usize>>,
    buckets: Vec<Bucket>,
    places: BTreeMap<usize, (usize, usize)>,
}

impl LayoutBuilder {
    /// Nothing placed yet of what a rank holds.
    pub(crate) fn new(parameters: Vec<ParameterSpec>, held: Vec<Holding>) -> Self {
        let mut groups: Vec<_> = held.iter().map(|h| h.replicas.clone()).collect();
        groups.sort_unstable();
        groups.dedup();
        let named = |h: Holding| (parameters[h.parameter].name.clone(), h);
        Self {
            held: held.into_iter().map(named).collect(),
            parameters,
            groups,
            buckets: Vec::new(),
            places: BTreeMap::new(),
        }
    }

    /// Starts a bucket and says its index.
    pub(crate) fn start_bucket(&mut self) -> usize {
        self.buckets.push(Bucket {
            parts: Vec::new(),
            len: 0,
        });
        self.buckets.len() - 1
    }

    /// Places what the rank holds of these parameters as one tensor, stacked along dim 0.
    ///
    /// # Errors
    /// `Defect` if a name is unknown or placed already.
    pub(crate) fn stack(&mut self, names: &[&str]) -> Result<TensorRef> {
        self.place(names, false)
    }

    /// As [`Self::stack`], for tensors whose gradient another rank may compute just the same.
    ///
    /// # Errors
    /// As [`Self::stack`].
    pub(crate) fn place(&mut self, names: &[&str], redundant: bool) -> Result<TensorRef> {
        let bucket = self.buckets.len().saturating_sub(1);
        let start = self.buckets.last().map_or(0, |b| b.len);
        let mut end = start;
        for &name in names {
            let held = self
                .held
                .remove(name)
                .ok_or_else(|| defect("a module names a parameter that is not free", name))?;
            let count: usize = held.runs.iter().map(Range::len).sum();
            let group = self.groups.binary_search(&held.replicas);
            let group = group.map_err(|_| defect("a parameter's holders are no group", name))?;
            let target = self
                .buckets
                .last_mut()
                .ok_or_else(|| defect("a parameter came before any bucket", name))?;
            self.places
                .insert(held.parameter, (bucket, target.parts.len()));
            target.parts.push(Part {
                parameter: held.parameter,
                range: end..end + count,
                runs: held.runs,
                group,
                redundant,
            });
            end += count;
            target.len = end;
        }
        Ok(TensorRef {
            bucket,
            range: start..end,
        })
    }

    /// The layout, once every parameter that the rank holds has its place.
    ///
    /// # Errors
    /// `Defect` naming a parameter that no module has placed.
    pub(crate) fn finish(self) -> Result<Layout> {
        if let Some(name) = self.held.keys().next() {
            return Err(defect("no module holds this parameter", name));
        }
        let regions = self
            .buckets
            .iter()
            .enumerate()
            .flat_map(|(bucket, b)| b.regions(bucket))
            .collect();
        Ok(Layout {
            parameters: self.parameters,
            buckets: self.buckets,
            regions,
            groups: self.groups,
            places: self.places,
        })
    }
}

fn defect(message: &str, name: &str) -> Error {
    Error::new(ErrorKind::Defect, "lay_out_weights", message).with("parameter", name)
}

impl Layout {
    /// Every parameter of the model, in `ModelSpec::parameters`' order.
    pub(crate) fn parameters(&self) -> &[ParameterSpec] {
        &self.parameters
    }

    /// The buckets, in the order of the forward pass.
    pub(crate) fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// The regions of all buckets, in order.
    pub(crate) fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Sets of world ranks, this one among them, that hold the same elements.
    pub(crate) fn groups(&self) -> &[Vec<usize>] {
        &self.groups
    }

    /// What lies in a region's `range` (of its bucket): each part's piece of it, none empty.
    pub(crate) fn pieces(&self, region: usize, range: Range<usize>) -> impl Iterator<Item = Part> {
        self.buckets[self.regions[region].bucket].pieces(range)
    }

    /// Where a parameter lies, by its index, if the rank holds any of it.
    pub(crate) fn find(&self, parameter: usize) -> Option<(usize, &Part)> {
        let &(bucket, part) = self.places.get(&parameter)?;
        Some((bucket, &self.buckets[bucket].parts[part]))
    }

    /// Every part of every bucket.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (usize, &Part)> {
        let of = |(bucket, b)| {
            let b: &Bucket = b;
            b.parts.iter().map(move |part| (bucket, part))
        };
        self.buckets.iter().enumerate().flat_map(of)
    }
}

impl Bucket {
    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Its parts, one after the other.
    pub(crate) fn parts(&self) -> &[Part] {
        &self.parts
    }

    fn regions(&self, bucket: usize) -> Vec<Region> {
        let mut regions: Vec<Region> = Vec::new();
        for part in &self.parts {
            match regions.last_mut() {
                Some(last) if last.group == part.group => last.range.end = part.range.end,
                _ => regions.push(Region {
                    bucket,
                    range: part.range.clone(),
                    group: part.group,
                }),
            }
        }
        regions
    }

    fn pieces(&self, range: Range<usize>) -> impl Iterator<Item = Part> {
        self.parts.iter().filter_map(move |part| {
            let start = part.range.start.max(range.start);
            let end = part.range.end.min(range.end);
            (start < end).then(|| Part {
                range: start..end,
                runs: sub_runs(&part.runs, start - part.range.start..end - part.range.start),
                ..part.clone()
            })
        })
    }
}

/// The runs of elements `within` of those that `runs` lists one after the other.
fn sub_runs(runs: &[Range<usize>], within: Range<usize>) -> Vec<Range<usize>> {
    let mut at = 0;
    runs.iter()
        .filter_map(|run| {
            let start = within.start.max(at);
            let end = within.end.min(at + run.len());
            let base = run.start.wrapping_sub(at);
            at += run.len();
            (start < end).then(|| base.wrapping_add(start)..base.wrapping_add(end))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sub_runs_keep_global_coordinates() {
        // Columns 2..4 of a [3, 6] matrix: a run a row.
        let runs = [2..4, 8..10, 14..16];
        assert_eq!(sub_runs(&runs, 0..6), runs);
        assert_eq!(sub_runs(&runs, 1..5), [3..4, 8..10, 14..15]);
        assert_eq!(sub_runs(&runs, 2..5), [8..10, 14..15]);
        assert_eq!(sub_runs(&runs, 3..3), Vec::<Range<usize>>::new());
    }

    #[test]
    fn neighbours_with_the_same_holders_are_one_region() {
        let held = |parameter, replicas: &[usize]| Holding {
            parameter,
            runs: vec![0..2],
            replicas: replicas.to_vec(),
        };
        let names = ["a", "b", "c", "d"];
        let spec = |name: &str| ParameterSpec {
            name: name.to_owned(),
            shape: vec![4],
            kind: drivetrain_core::model::ParameterKind::ColumnLinear,
            layer: None,
            expert: None,
            dtype: drivetrain_core::DType::F32,
        };
        let parameters = names.map(spec).to_vec();
        let holdings = vec![
            held(0, &[1]),
            held(1, &[1]),
            held(2, &[0, 1]),
            held(3, &[1]),
        ];
        let mut builder = LayoutBuilder::new(parameters, holdings);
        builder.start_bucket();
        builder.stack(&["a", "b", "c"]).unwrap();
        builder.start_bucket();
        builder.stack(&["d"]).unwrap();
        assert!(builder.stack(&["d"]).is_err());
        let layout = builder.finish().unwrap();
        assert_eq!(layout.groups(), [vec![0, 1], vec![1]]);
        let found: Vec<_> = layout
            .regions()
            .iter()
            .map(|r| (r.bucket, r.range.clone(), r.group))
            .collect();
        assert_eq!(found, [(0, 0..4, 1), (0, 4..6, 0), (1, 0..2, 1)]);
    }
}

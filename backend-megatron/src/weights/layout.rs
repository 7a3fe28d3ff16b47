//! Where each parameter lies in the buckets: fused tensors are neighbours, so no weight is ever copied to be
//! multiplied.

use std::ops::Range;

use drivetrain_core::{Error, ErrorKind, Result, model::ParameterSpec};

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
}

/// Tensors that are reduced, updated and gathered together: those of one block, say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bucket {
    parts: Vec<Part>,
    len: usize,
}

/// All buckets of a rank.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Layout {
    parameters: Vec<ParameterSpec>,
    buckets: Vec<Bucket>,
    /// Bucket and part of each parameter.
    places: Vec<(usize, usize)>,
}

/// Places tensors one after the other.
#[derive(Debug)]
pub(crate) struct LayoutBuilder {
    parameters: Vec<ParameterSpec>,
    buckets: Vec<Bucket>,
    places: Vec<Option<(usize, usize)>>,
}

impl LayoutBuilder {
    /// Nothing placed yet of these parameters.
    pub(crate) fn new(parameters: Vec<ParameterSpec>) -> Self {
        let places = vec![None; parameters.len()];
        Self {
            parameters,
            buckets: Vec::new(),
            places,
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

    /// Places these parameters as one tensor, stacked along dim 0.
    ///
    /// # Errors
    /// `Defect` if a name is unknown or placed already.
    pub(crate) fn stack(&mut self, names: &[&str]) -> Result<TensorRef> {
        let bucket = self.buckets.len().saturating_sub(1);
        let start = self.buckets.last().map_or(0, |b| b.len);
        let mut end = start;
        for &name in names {
            let parameter = self
                .parameters
                .iter()
                .position(|p| p.name == name)
                .filter(|&p| self.places[p].is_none())
                .ok_or_else(|| defect("a module names a parameter that is not free", name))?;
            let count = self.parameters[parameter].num_elements();
            let target = self
                .buckets
                .last_mut()
                .ok_or_else(|| defect("a parameter came before any bucket", name))?;
            self.places[parameter] = Some((bucket, target.parts.len()));
            target.parts.push(Part {
                parameter,
                range: end..end + count,
                // All of it: a tensor-parallel share would be a run a row, or rows of its own.
                runs: std::iter::once(0..count).collect(),
            });
            end += count;
            target.len = end;
        }
        Ok(TensorRef {
            bucket,
            range: start..end,
        })
    }

    /// The layout, once every parameter has its place.
    ///
    /// # Errors
    /// `Defect` naming a parameter that no module has placed.
    pub(crate) fn finish(self) -> Result<Layout> {
        let places = self
            .places
            .iter()
            .zip(&self.parameters)
            .map(|(place, p)| {
                place.ok_or_else(|| defect("no module holds this parameter", &p.name))
            })
            .collect::<Result<_>>()?;
        Ok(Layout {
            parameters: self.parameters,
            buckets: self.buckets,
            places,
        })
    }
}

fn defect(message: &str, name: &str) -> Error {
    Error::new(ErrorKind::Defect, "lay_out_weights", message).with("parameter", name)
}

impl Layout {
    /// Every parameter, in `ModelSpec::parameters`' order.
    pub(crate) fn parameters(&self) -> &[ParameterSpec] {
        &self.parameters
    }

    /// The buckets, in the order of the forward pass.
    pub(crate) fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// Where a parameter lies, by its index.
    pub(crate) fn place(&self, parameter: usize) -> (usize, &Part) {
        let (bucket, part) = self.places[parameter];
        (bucket, &self.buckets[bucket].parts[part])
    }
}

impl Bucket {
    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// What lies in `range`: each part's piece of it, none empty.
    pub(crate) fn pieces(&self, range: Range<usize>) -> impl Iterator<Item = Part> + '_ {
        self.parts.iter().filter_map(move |part| {
            let start = part.range.start.max(range.start);
            let end = part.range.end.min(range.end);
            (start < end).then(|| Part {
                parameter: part.parameter,
                range: start..end,
                runs: sub_runs(&part.runs, start - part.range.start..end - part.range.start),
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
}

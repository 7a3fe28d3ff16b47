//! The one door for weights: refit, export and transfer between engines all pass through it.

mod discard;
mod memory;
mod seeded;
mod stream;

pub use discard::DiscardingSink;
pub use memory::MemoryWeights;
pub use seeded::SeededWeights;
pub use stream::{Masters, Streamer};
pub(crate) use stream::{not_finite, overflow};

use std::{fmt, ops::Range};

use crate::{DType, Error, ErrorKind, Result, View, model::ParameterSpec};

/// What will be sent.
#[derive(Debug, Clone, PartialEq)]
pub struct WeightManifest {
    /// Every tensor, in the order it will come.
    pub tensors: Vec<ParameterSpec>,
    /// A number that tells versions apart: the engine's step.
    pub version: u64,
}

/// A part of a global tensor, with its values.
#[derive(Debug, Clone)]
pub struct TensorSlice<'a> {
    /// Name in a Hugging Face checkpoint.
    pub name: &'a str,
    /// Shape of the whole tensor.
    pub shape: &'a [usize],
    /// The part, a range a dim.
    pub slice: Vec<Range<usize>>,
    /// The part's values in row-major order, with their dtype and device.
    pub data: View<'a>,
    /// Multiplies the values (for quantised formats).
    pub scale: Option<View<'a>>,
}

impl TensorSlice<'_> {
    /// Whether it is the whole tensor.
    pub fn is_full(&self) -> bool {
        self.slice.len() == self.shape.len()
            && self
                .slice
                .iter()
                .zip(self.shape)
                .all(|(r, &n)| *r == (0..n))
    }
}

/// What a sink wants to be given: full tensors, in buckets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SinkLayout {
    /// Whether this rank wants them (a sink on rank 0 only says false elsewhere; the rank still takes part in
    /// the gathering).
    pub receives: bool,
    /// Bytes after which a bucket is sent. A tensor larger than this is a bucket of its own.
    pub bucket_bytes: usize,
}

impl Default for SinkLayout {
    fn default() -> Self {
        Self {
            receives: true,
            bucket_bytes: 64 << 20,
        }
    }
}

/// Receives weights. `begin`, any number of `bucket`, then `commit` or `abort`.
pub trait WeightSink: fmt::Debug {
    /// What this rank's sink wants.
    fn layout(&self) -> SinkLayout {
        SinkLayout::default()
    }

    /// Announces what will come.
    ///
    /// # Errors
    /// The sink's own.
    fn begin(&mut self, manifest: &WeightManifest) -> Result<()>;

    /// Takes some tensors; the views end with the call.
    ///
    /// # Errors
    /// The sink's own.
    fn bucket(&mut self, tensors: &[TensorSlice<'_>]) -> Result<()>;

    /// All has come: make it visible at once.
    ///
    /// # Errors
    /// The sink's own.
    fn commit(&mut self) -> Result<()>;

    /// It will not be completed: leave nothing behind.
    fn abort(&mut self);
}

/// Gives weights, by Hugging Face names.
pub trait WeightSource: Send + Sync + fmt::Debug {
    /// Names it holds.
    fn names(&self) -> Vec<String>;

    /// Shape and dtype of a tensor.
    ///
    /// # Errors
    /// `File` naming the tensor and where it was looked for.
    fn describe(&self, name: &str) -> Result<(Vec<usize>, DType)>;

    /// Some elements of a tensor, one run of its flattened elements after the other, as f32: exact from f32, f16 and
    /// bf16. A rank reads its part so, and nothing else.
    ///
    /// # Errors
    /// As `describe`; `Defect` for a run that is not within the tensor.
    fn read_runs(&self, name: &str, runs: &[Range<usize>]) -> Result<Vec<f32>>;

    /// A whole tensor, as f32.
    ///
    /// # Errors
    /// As `describe`.
    fn read(&self, name: &str) -> Result<Vec<f32>> {
        let (shape, _) = self.describe(name)?;
        let whole = 0..shape.iter().product();
        self.read_runs(name, std::slice::from_ref(&whole))
    }

    /// A whole tensor, as f64: exact.
    ///
    /// # Errors
    /// As `describe`.
    fn read_f64(&self, name: &str) -> Result<Vec<f64>> {
        Ok(self.read(name)?.into_iter().map(f64::from).collect())
    }
}

/// Reads runs of a tensor, one after the other, into memory of their size: a rank's part.
///
/// # Errors
/// As [`WeightSource::read_runs`]; `File` if the source gives another number of elements.
pub fn read_into(
    source: &dyn WeightSource,
    name: &str,
    runs: &[Range<usize>],
    target: &mut [f32],
) -> Result<()> {
    let values = source.read_runs(name, runs)?;
    if values.len() != target.len() {
        return Err(Error::new(
            ErrorKind::File,
            "import_weights",
            "the source gave another number of elements than was asked for",
        )
        .with("tensor", name)
        .with("expected", target.len())
        .with("found", values.len()));
    }
    target.copy_from_slice(&values);
    Ok(())
}

/// Holds runs against a tensor of this many elements; how many they are together.
pub(crate) fn check_runs(name: &str, runs: &[Range<usize>], num_elements: usize) -> Result<usize> {
    let within = |run: &&Range<usize>| run.start <= run.end && run.end <= num_elements;
    match runs.iter().find(|run| !within(run)) {
        None => Ok(runs.iter().map(Range::len).sum()),
        Some(run) => Err(
            Error::new(ErrorKind::Defect, "read_weights", "a run is out of range")
                .with("tensor", name)
                .with("found", format!("{run:?}"))
                .with("expected", format!("within 0..{num_elements}")),
        ),
    }
}

/// Holds a source against a model's parameters, whose values nobody has read yet.
///
/// # Errors
/// `File` naming a tensor that is missing or has another shape.
pub fn check_shapes(source: &dyn WeightSource, parameters: &[ParameterSpec]) -> Result<()> {
    for spec in parameters {
        let (shape, _) = source.describe(&spec.name)?;
        if shape != spec.shape {
            return Err(Error::new(
                ErrorKind::File,
                "import_weights",
                "a tensor has another shape than the model's config says",
            )
            .with("tensor", &spec.name)
            .with("expected", format!("{:?}", spec.shape))
            .with("found", format!("{shape:?}")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_is_full_in_every_dim_or_not_at_all() {
        let full = |slice: Vec<Range<usize>>| {
            let data = View::F32(&[]);
            TensorSlice {
                name: "w",
                shape: &[2, 3],
                slice,
                data,
                scale: None,
            }
            .is_full()
        };
        assert!(full(vec![0..2, 0..3]));
        assert!(!full(vec![0..2, 0..2]) && !full(vec![1..2, 0..3]));
        assert!(!full(vec![]) && !full(std::iter::once(0..2).collect()));
    }
}

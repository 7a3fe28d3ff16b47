//! Weights in host memory: transfer between engines, and tests.

use std::ops::Range;

use indexmap::IndexMap;

use super::{SinkLayout, TensorSlice, WeightManifest, WeightSink, WeightSource, check_runs};
use crate::{DType, Error, ErrorKind, Result};

/// Full tensors in host memory as f64, which holds every float dtype exactly. A sink and a source.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MemoryWeights {
    tensors: IndexMap<String, Tensor>,
    committed: bool,
}

#[derive(Debug, Clone, PartialEq)]
struct Tensor {
    shape: Vec<usize>,
    dtype: DType,
    values: Vec<f64>,
}

impl MemoryWeights {
    /// Nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a tensor.
    ///
    /// # Errors
    /// `Data` if the values do not fill the shape.
    pub fn insert(
        &mut self,
        name: &str,
        shape: &[usize],
        dtype: DType,
        values: Vec<f64>,
    ) -> Result<()> {
        let expected: usize = shape.iter().product();
        if values.len() != expected {
            return Err(Error::new(
                ErrorKind::Data,
                "insert_weight",
                "the values do not fill the shape",
            )
            .with("tensor", name)
            .with("expected", expected)
            .with("found", values.len()));
        }
        self.tensors.insert(
            name.to_owned(),
            Tensor {
                shape: shape.to_vec(),
                dtype,
                values,
            },
        );
        Ok(())
    }

    /// A tensor's values.
    pub fn values(&self, name: &str) -> Option<&[f64]> {
        self.tensors.get(name).map(|t| t.values.as_slice())
    }

    /// Names, shapes and values in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &[usize], &[f64])> {
        self.tensors
            .iter()
            .map(|(n, t)| (n.as_str(), t.shape.as_slice(), t.values.as_slice()))
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Whether a sender has committed.
    pub fn is_committed(&self) -> bool {
        self.committed
    }

    fn tensor(&self, name: &str) -> Result<&Tensor> {
        self.tensors.get(name).ok_or_else(|| {
            Error::new(ErrorKind::File, "read_weights", "no such tensor in memory")
                .with("tensor", name)
        })
    }
}

impl WeightSink for MemoryWeights {
    fn layout(&self) -> SinkLayout {
        SinkLayout::default()
    }

    fn begin(&mut self, _manifest: &WeightManifest) -> Result<()> {
        *self = Self::default();
        Ok(())
    }

    fn bucket(&mut self, tensors: &[TensorSlice<'_>]) -> Result<()> {
        for tensor in tensors {
            let values = tensor
                .data
                .to_f64()
                .filter(|_| tensor.is_full())
                .ok_or_else(|| {
                    Error::new(
                        ErrorKind::Defect,
                        "receive_weights",
                        "wanted a full tensor in host memory",
                    )
                    .with("tensor", tensor.name)
                })?;
            self.insert(tensor.name, tensor.shape, tensor.data.dtype(), values)?;
        }
        Ok(())
    }

    fn commit(&mut self) -> Result<()> {
        self.committed = true;
        Ok(())
    }

    fn abort(&mut self) {
        *self = Self::default();
    }
}

impl WeightSource for MemoryWeights {
    fn names(&self) -> Vec<String> {
        self.tensors.keys().cloned().collect()
    }

    fn describe(&self, name: &str) -> Result<(Vec<usize>, DType)> {
        self.tensor(name).map(|t| (t.shape.clone(), t.dtype))
    }

    fn read_runs(&self, name: &str, runs: &[Range<usize>]) -> Result<Vec<f32>> {
        let values = &self.tensor(name)?.values;
        check_runs(name, runs, values.len())?;
        let parts = runs.iter().flat_map(|run| &values[run.clone()]);
        Ok(parts.map(|&v| v as f32).collect())
    }

    fn read_f64(&self, name: &str) -> Result<Vec<f64>> {
        self.tensor(name).map(|t| t.values.clone())
    }
}

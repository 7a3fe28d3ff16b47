//! What parity is judged by, kept by one rank and no wider than it was computed.

use std::borrow::Cow;

use drivetrain_conformance::compare::largest;
use drivetrain_core::{
    DType, Error, ErrorKind, Result, View,
    communicator::Communicator,
    engine::{Engine, Weights},
    weights::{DiscardingSink, TensorSlice, WeightManifest, WeightSink},
};
use indexmap::IndexMap;

/// Of the first steps of a run.
#[derive(Debug, Default)]
pub(super) struct Evidence {
    /// Log-probs of the first batch under the first weights, `[T]`.
    pub(super) log_probs: Vec<f64>,
    pub(super) steps: Vec<StepEvidence>,
    /// After the steps.
    pub(super) weights: Kept,
    /// Loss of each step.
    pub(super) losses: Vec<f64>,
}

/// Of one step.
#[derive(Debug)]
pub(super) struct StepEvidence {
    /// Empty where they were not wanted.
    pub(super) gradients: Kept,
    pub(super) clip_factor: f64,
    pub(super) learning_rate: f64,
}

/// Values of every parameter, as f64 where the engine computes so, else as f32.
#[derive(Debug, Default)]
pub(super) struct Kept {
    wide: bool,
    tensors: IndexMap<String, Values>,
}

#[derive(Debug)]
enum Values {
    F32(Vec<f32>),
    F64(Vec<f64>),
}

impl Kept {
    /// An engine's accumulated gradients, on rank 0. Collective.
    pub(super) fn gradients(
        engine: &mut dyn Engine,
        world: &dyn Communicator,
        compute: DType,
    ) -> Result<Self> {
        Self::receive(world, compute, |sink| engine.export_gradients(sink))
    }

    /// Its weights, likewise.
    pub(super) fn weights(
        engine: &mut dyn Engine,
        world: &dyn Communicator,
        compute: DType,
    ) -> Result<Self> {
        Self::receive(world, compute, |sink| {
            engine.export_weights(&Weights::Policy, sink)
        })
    }

    fn receive(
        world: &dyn Communicator,
        compute: DType,
        send: impl FnOnce(&mut dyn WeightSink) -> Result<()>,
    ) -> Result<Self> {
        let mut kept = Self {
            wide: compute == DType::F64,
            ..Self::default()
        };
        match world.rank() {
            0 => send(&mut kept)?,
            _ => send(&mut DiscardingSink)?,
        }
        Ok(kept)
    }

    /// A tensor's values; nothing where it is missing.
    pub(super) fn values(&self, name: &str) -> Cow<'_, [f64]> {
        match self.tensors.get(name) {
            Some(Values::F64(values)) => values.into(),
            Some(Values::F32(values)) => {
                let wide: Vec<f64> = values.iter().map(|&v| v.into()).collect();
                wide.into()
            }
            None => Cow::default(),
        }
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &String> {
        self.tensors.keys()
    }

    /// The largest magnitude of each tensor.
    pub(super) fn magnitudes(&self) -> IndexMap<String, f64> {
        let of = |name: &String| (name.clone(), largest(&self.values(name)));
        self.names().map(of).collect()
    }
}

impl WeightSink for Kept {
    fn begin(&mut self, _manifest: &WeightManifest) -> Result<()> {
        self.tensors.clear();
        Ok(())
    }

    fn bucket(&mut self, tensors: &[TensorSlice<'_>]) -> Result<()> {
        for tensor in tensors {
            let values = match (&tensor.data, self.wide) {
                (View::F64(values), true) => Some(Values::F64(values.to_vec())),
                (data, _) => data.to_f32().map(Values::F32),
            };
            let values = values.filter(|_| tensor.is_full()).ok_or_else(|| {
                let message = "wanted a full tensor in host memory";
                Error::new(ErrorKind::Defect, "keep_evidence", message).with("tensor", tensor.name)
            })?;
            self.tensors.insert(tensor.name.to_owned(), values);
        }
        Ok(())
    }

    fn commit(&mut self) -> Result<()> {
        Ok(())
    }

    fn abort(&mut self) {
        self.tensors.clear();
    }
}

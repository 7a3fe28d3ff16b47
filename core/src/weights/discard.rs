//! The sink of ranks that take part in an export and keep nothing.

use super::{SinkLayout, TensorSlice, WeightManifest, WeightSink};
use crate::Result;

/// Receives nothing: for every rank but the one whose sink is the real one.
#[derive(Debug, Clone, Copy, Default)]
pub struct DiscardingSink;

impl WeightSink for DiscardingSink {
    fn layout(&self) -> SinkLayout {
        SinkLayout {
            receives: false,
            ..SinkLayout::default()
        }
    }

    fn begin(&mut self, _manifest: &WeightManifest) -> Result<()> {
        Ok(())
    }

    fn bucket(&mut self, _tensors: &[TensorSlice<'_>]) -> Result<()> {
        Ok(())
    }

    fn commit(&mut self) -> Result<()> {
        Ok(())
    }

    fn abort(&mut self) {}
}

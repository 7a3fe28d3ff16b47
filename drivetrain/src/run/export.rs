//! A checkpoint as a Hugging Face folder, with no engine.

use drivetrain_core::{
    Error, ErrorKind, Result, View,
    checkpoint::{StateReader, StateSlot},
    model::ModelSpec,
    weights::{TensorSlice, WeightManifest, WeightSink},
};

/// Streams a checkpoint's weights into a sink, a tensor a bucket.
///
/// # Errors
/// `Checkpoint` if a weight is missing or of another shape; the sink's, after it was aborted.
pub fn export_checkpoint(
    checkpoint: &dyn StateReader,
    step: u64,
    model: &ModelSpec,
    sink: &mut dyn WeightSink,
) -> Result<()> {
    let result = stream(checkpoint, step, model, sink);
    if result.is_err() {
        sink.abort();
    }
    result
}

fn stream(
    checkpoint: &dyn StateReader,
    step: u64,
    model: &ModelSpec,
    sink: &mut dyn WeightSink,
) -> Result<()> {
    let parameters = model.parameters();
    for parameter in &parameters {
        let found = checkpoint.shape(&parameter.name, StateSlot::Weight);
        if found.as_ref() != Some(&parameter.shape) {
            return Err(Error::new(
                ErrorKind::Checkpoint,
                "export",
                "the checkpoint is not of this model",
            )
            .with("tensor", &parameter.name)
            .with("expected", format!("{:?}", parameter.shape))
            .with("found", format!("{found:?}")));
        }
    }
    sink.begin(&WeightManifest {
        tensors: parameters.clone(),
        version: step,
    })?;
    for parameter in &parameters {
        let whole = 0..parameter.num_elements();
        let values = checkpoint.read(&parameter.name, StateSlot::Weight, &[whole])?;
        sink.bucket(&[TensorSlice {
            name: &parameter.name,
            shape: &parameter.shape,
            slice: parameter.shape.iter().map(|&n| 0..n).collect(),
            data: View::F32(&values),
            scale: None,
        }])?;
    }
    sink.commit()
}

//! A checkpoint as a Hugging Face folder, with no engine.

use drivetrain_core::{
    DType, Error, ErrorKind, Result,
    checkpoint::{StateReader, StateSlot},
    model::ModelSpec,
    weights::{Streamer, WeightSink},
};

/// Streams a checkpoint's weights into a sink, as f32.
///
/// # Errors
/// `Checkpoint` if a weight is missing or of another shape; the sink's, after it was aborted.
pub fn export_checkpoint(
    checkpoint: &dyn StateReader,
    step: u64,
    model: &ModelSpec,
    sink: &mut dyn WeightSink,
) -> Result<()> {
    let mut parameters = model.parameters();
    for parameter in &mut parameters {
        parameter.dtype = DType::F32;
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
    let mut stream = Streamer::begin(sink, parameters.clone(), step);
    let read = parameters.iter().try_for_each(|parameter| {
        let whole = 0..parameter.num_elements();
        stream.push(checkpoint.read(&parameter.name, StateSlot::Weight, &[whole])?);
        Ok(())
    });
    let sent = read.and(stream.flush());
    stream.finish(sent)
}

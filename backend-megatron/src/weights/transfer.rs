//! Weights in and out: reading a source, drawing from a seed, streaming to a sink.

use drivetrain_core::{
    DType, Result,
    model::ParameterSpec,
    weights::{Streamer, WeightSink, WeightSource},
};

use super::{Buffers, Layout};

/// Reads every parameter.
///
/// # Errors
/// The source's.
pub(crate) fn import(layout: &Layout, source: &dyn WeightSource) -> Result<Buffers> {
    let mut weights = Buffers::zeros(layout);
    for (index, spec) in layout.parameters().iter().enumerate() {
        let (bucket, part) = layout.place(index);
        let values = source.read(&spec.name)?;
        let mut target = &mut weights.bucket_mut(bucket)[part.range.clone()];
        for run in &part.runs {
            let (head, tail) = target.split_at_mut(run.len());
            head.copy_from_slice(&values[run.clone()]);
            target = tail;
        }
    }
    Ok(weights)
}

/// Streams every parameter to a sink in `ModelSpec::parameters`' order, as the dtype that `dtype_of` says.
///
/// # Errors
/// As [`Streamer`].
pub(crate) fn export(
    layout: &Layout,
    weights: &Buffers,
    version: u64,
    dtype_of: impl Fn(&ParameterSpec) -> DType,
    sink: &mut dyn WeightSink,
) -> Result<()> {
    let tensors: Vec<_> = layout
        .parameters()
        .iter()
        .map(|spec| ParameterSpec {
            dtype: dtype_of(spec),
            ..spec.clone()
        })
        .collect();
    let mut stream = Streamer::begin(sink, tensors, version);
    for index in 0..layout.parameters().len() {
        let (bucket, part) = layout.place(index);
        stream.push(&weights.bucket(bucket)[part.range.clone()]);
    }
    let sent = stream.flush();
    stream.finish(sent)
}

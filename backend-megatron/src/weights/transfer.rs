//! Weights in and out: reading a source, drawing from a seed, streaming to a sink.

use std::ops::Range;

use drivetrain_core::{
    DType, Result,
    communicator::Communicator,
    model::ParameterSpec,
    plan::{Holding, Holdings},
    weights::{Masters, Streamer, WeightSink, WeightSource, read_into},
};
use drivetrain_kernels::Processor;

use super::{Buffers, Layout};

/// Reads what this rank holds of every parameter, into a processor's memory.
///
/// # Errors
/// The source's.
pub(crate) fn import(
    layout: &Layout,
    processor: &Processor,
    source: &dyn WeightSource,
) -> Result<Buffers> {
    let mut weights = Buffers::zeros(layout, processor);
    for (bucket, part) in layout.parts() {
        let target = &mut weights.bucket_mut(bucket)[part.range.clone()];
        let name = &layout.parameters()[part.parameter].name;
        read_into(source, name, &part.runs, target)?;
    }
    Ok(weights)
}

/// Streams every parameter to a sink in `ModelSpec::parameters`' order, as the dtype that `dtype_of` says.
/// Collective over `world`: a tensor of which ranks hold parts is gathered, and a rank whose sink fails goes on
/// gathering, so that the others do not wait for it; then every rank has an error.
///
/// # Errors
/// As [`Streamer`]; the communicator's.
pub(crate) fn export(
    (layout, holdings): (&Layout, Holdings<'_>),
    world: &dyn Communicator,
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
    let gathered = layout
        .parameters()
        .iter()
        .enumerate()
        .try_for_each(|(index, spec)| {
            let own = layout
                .find(index)
                .map_or(&[][..], |(b, part)| &weights.bucket(b)[part.range.clone()]);
            let parts = holdings.parts(index, spec);
            stream.push(whole(world, spec, &parts, own)?);
            Ok(())
        });
    let outcome = gathered.and(stream.flush());
    stream.finish(world.agree("export_weights", outcome))
}

/// The tensor of which this rank holds `own`: that itself where every rank holds all of it.
fn whole<'a>(
    world: &dyn Communicator,
    spec: &ParameterSpec,
    parts: &[Holding],
    own: &'a [f32],
) -> Result<Masters<'a>> {
    if let [all] = parts
        && all.replicas.len() == world.world_size()
    {
        return Ok(own.into());
    }
    // Parts come by their first holder, which sends them.
    let mut counts = vec![0; world.world_size()];
    for part in parts {
        counts[part.replicas[0]] = part.runs.iter().map(Range::len).sum();
    }
    let sent = &own[..counts[world.rank()].min(own.len())];
    let mut gathered = vec![0.0_f32; spec.num_elements()];
    world
        .all_gather(sent.into(), gathered.as_mut_slice().into(), &counts)?
        .wait()?;
    let runs = || parts.iter().flat_map(|part| part.runs.iter().cloned());
    if runs().is_sorted_by_key(|run| run.start) {
        return Ok(gathered.into());
    }
    let (mut values, mut at) = (vec![0.0_f32; gathered.len()], 0);
    for run in runs() {
        let end = at + run.len();
        values[run].copy_from_slice(&gathered[at..end]);
        at = end;
    }
    Ok(values.into())
}

//! Shards to a sink: bucket by bucket, one parameter gathered at a time.

use drivetrain_core::{
    Error, ErrorKind, Result,
    communicator::Communicator,
    model::ParameterSpec,
    weights::{Masters, Streamer, WeightSink},
};
use tch::Tensor;

use crate::{error::torch, host::floats, sharding::Unit};

/// What is exported: shards that lie like the units' own.
#[derive(Debug)]
pub(crate) struct Export<'a> {
    /// The units, root first.
    pub(crate) units: &'a [Unit],
    /// A shard tensor of each unit.
    pub(crate) shards: Vec<&'a Tensor>,
    /// The specs in the order they are sent, with the dtype they are sent in.
    pub(crate) specs: Vec<ParameterSpec>,
    /// The engine's step.
    pub(crate) version: u64,
}

/// Streams to the sink. Collective over `group`, the shard group; a rank whose sink fails goes on gathering, so
/// that the others do not wait for it, and then every rank has an error.
///
/// # Errors
/// As [`Streamer`]; the communicator's.
pub(crate) fn export(
    export: &Export<'_>,
    group: &dyn Communicator,
    sink: &mut dyn WeightSink,
) -> Result<()> {
    let mut wanted = [f64::from(u8::from(sink.layout().receives))];
    group.sum_f64(&mut wanted)?;
    let mut stream = Streamer::begin(sink, export.specs.clone(), export.version);
    let gathered = export.specs.iter().try_for_each(|spec| {
        let values = export.tensor(spec, wanted[0] > 0.0, group)?;
        stream.push(values);
        Ok(())
    });
    let outcome = gathered.and(stream.flush());
    stream.finish(group.agree("export_weights", outcome))
}

impl<'a> Export<'a> {
    /// A whole parameter, gathered where any rank wants it; else this rank's shard.
    fn tensor(
        &self,
        spec: &ParameterSpec,
        wanted: bool,
        group: &dyn Communicator,
    ) -> Result<Masters<'a>> {
        let (unit, parameter) = self.find(spec)?;
        let shard = floats(self.shards[unit]).map_err(torch("export_weights"))?;
        let unit = &self.units[unit].layout;
        let own = &shard[unit.shard(group.rank(), parameter)];
        if !wanted || group.world_size() == 1 {
            return Ok(own.into());
        }
        let mut whole = vec![0.0f32; spec.num_elements()];
        let counts: Vec<_> = (0..group.world_size())
            .map(|rank| unit.shard(rank, parameter).len())
            .collect();
        group
            .all_gather(own.into(), whole.as_mut_slice().into(), &counts)?
            .wait()?;
        Ok(whole.into())
    }

    fn find(&self, spec: &ParameterSpec) -> Result<(usize, usize)> {
        // Numbers first: names are compared within one unit only.
        let in_layer = |s: &ParameterSpec| s.layer == spec.layer && s.name == spec.name;
        let places = self.units.iter().enumerate().find_map(|(u, unit)| {
            let at = unit.layout.specs().iter().position(in_layer);
            at.map(|p| (u, p))
        });
        places.ok_or_else(|| {
            Error::new(
                ErrorKind::Defect,
                "export_weights",
                "a parameter is in no unit",
            )
            .with("tensor", &spec.name)
        })
    }
}

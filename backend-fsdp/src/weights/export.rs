//! Shards to a sink: bucket by bucket, one parameter gathered at a time.

use drivetrain_core::{
    DType, Error, ErrorKind, Result, View,
    communicator::Communicator,
    model::ParameterSpec,
    weights::{SinkLayout, TensorSlice, WeightManifest, WeightSink},
};
use half::{bf16, f16};
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
/// The sink's, which is then aborted; the communicator's.
pub(crate) fn export(
    export: &Export<'_>,
    group: &dyn Communicator,
    sink: &mut dyn WeightSink,
) -> Result<()> {
    let layout = sink.layout();
    let mut wants_full = [f64::from(u8::from(layout.full_tensors && layout.receives))];
    group.sum_f64(&mut wants_full)?;
    let manifest = WeightManifest {
        tensors: export.specs.clone(),
        version: export.version,
    };
    let mut outcome = match layout.receives {
        true => sink.begin(&manifest),
        false => Ok(()),
    };
    let mut bucket = Bucket::default();
    for spec in &export.specs {
        let gathered = export.tensor(spec, &layout, wants_full[0] > 0.0, group)?;
        let Some(piece) = gathered.filter(|_| outcome.is_ok()) else {
            continue;
        };
        if !bucket.pieces.is_empty() && bucket.bytes + piece.bytes() > layout.bucket_bytes {
            outcome = bucket.send(sink);
        }
        bucket.push(piece);
    }
    if layout.receives {
        outcome = outcome.and_then(|()| bucket.send(sink));
    }
    let mut failures = [f64::from(u8::from(outcome.is_err()))];
    let agreed = group.sum_f64(&mut failures);
    let outcome = outcome.and(agreed).and_then(|()| match failures[0] {
        0.0 => Ok(()),
        n => Err(Error::new(
            ErrorKind::File,
            "export_weights",
            "the sink of another rank failed",
        )
        .with("ranks_failed", n)),
    });
    if !layout.receives {
        return outcome;
    }
    let outcome = outcome.and_then(|()| sink.commit());
    if outcome.is_err() {
        sink.abort();
    }
    outcome
}

impl<'a> Export<'a> {
    /// This rank's view of a parameter: whole where any rank wants it so, else the rank's rows, if any.
    fn tensor(
        &self,
        spec: &'a ParameterSpec,
        layout: &SinkLayout,
        any_full: bool,
        group: &dyn Communicator,
    ) -> Result<Option<Piece<'a>>> {
        let (unit, parameter) = self.find(spec)?;
        let range = self.units[unit].layout.shard(group.rank(), parameter);
        let shard = floats(self.shards[unit]).map_err(torch("export_weights"))?;
        let own = &shard[range];
        let unit = &self.units[unit].layout;
        let mut whole = Vec::new();
        if any_full && group.world_size() > 1 {
            whole.resize(spec.num_elements(), 0.0);
            let counts: Vec<_> = (0..group.world_size())
                .map(|rank| unit.shard(rank, parameter).len())
                .collect();
            group
                .all_gather(own.into(), whole.as_mut_slice().into(), &counts)?
                .wait()?;
        }
        if !layout.receives {
            return Ok(None);
        }
        let mut slice: Vec<_> = spec.shape.iter().map(|&n| 0..n).collect();
        let values = match (layout.full_tensors, group.world_size()) {
            (true, 1) => Values::new(own, spec.dtype)?,
            (true, _) => Values::new(&whole, spec.dtype)?,
            (false, _) if own.is_empty() => return Ok(None),
            (false, _) => {
                if let Some(rows) = slice.first_mut() {
                    *rows = unit.rows(group.rank(), parameter);
                }
                Values::new(own, spec.dtype)?
            }
        };
        Ok(Some(Piece {
            spec,
            slice,
            values,
        }))
    }

    fn find(&self, spec: &ParameterSpec) -> Result<(usize, usize)> {
        let places = self.units.iter().enumerate().find_map(|(u, unit)| {
            let at = unit.layout.specs().iter().position(|s| s.name == spec.name);
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

#[derive(Debug, Default)]
struct Bucket<'a> {
    pieces: Vec<Piece<'a>>,
    bytes: usize,
}

impl<'a> Bucket<'a> {
    fn push(&mut self, piece: Piece<'a>) {
        self.bytes += piece.bytes();
        self.pieces.push(piece);
    }

    fn send(&mut self, sink: &mut dyn WeightSink) -> Result<()> {
        let pieces = std::mem::take(self).pieces;
        let slices: Vec<_> = pieces.iter().map(Piece::slice).collect();
        match slices.is_empty() {
            true => Ok(()),
            false => sink.bucket(&slices),
        }
    }
}

#[derive(Debug)]
struct Piece<'a> {
    spec: &'a ParameterSpec,
    slice: Vec<std::ops::Range<usize>>,
    values: Values,
}

impl Piece<'_> {
    fn bytes(&self) -> usize {
        self.values.view().num_bytes()
    }

    fn slice(&self) -> TensorSlice<'_> {
        TensorSlice {
            name: &self.spec.name,
            shape: &self.spec.shape,
            slice: self.slice.clone(),
            data: self.values.view(),
            scale: None,
        }
    }
}

/// Values in the dtype they are sent in.
#[derive(Debug)]
enum Values {
    F64(Vec<f64>),
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

impl Values {
    fn new(values: &[f32], dtype: DType) -> Result<Self> {
        Ok(match dtype {
            DType::F64 => Self::F64(values.iter().map(|&x| x.into()).collect()),
            DType::F32 => Self::F32(values.to_vec()),
            DType::Bf16 => Self::Bf16(values.iter().map(|&x| bf16::from_f32(x)).collect()),
            DType::F16 => Self::F16(values.iter().map(|&x| f16::from_f32(x)).collect()),
            DType::I64 | DType::I32 | DType::U8 => {
                return Err(Error::new(
                    ErrorKind::Config,
                    "export_weights",
                    "weights are not integers",
                )
                .with("found", dtype)
                .with("expected", "f64, f32, bf16 or f16"));
            }
        })
    }

    fn view(&self) -> View<'_> {
        match self {
            Self::F64(v) => v.into(),
            Self::F32(v) => v.into(),
            Self::Bf16(v) => v.into(),
            Self::F16(v) => v.into(),
        }
    }
}

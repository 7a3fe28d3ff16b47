//! Weights in and out: reading a source, drawing from a seed, streaming to a sink.

use drivetrain_core::{
    DType, Error, ErrorKind, Result, View,
    model::ParameterSpec,
    weights::{TensorSlice, WeightManifest, WeightSink, WeightSource},
};
use half::{bf16, f16};

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
/// A sink that fails is aborted.
///
/// # Errors
/// The sink's.
pub(crate) fn export(
    layout: &Layout,
    weights: &Buffers,
    version: u64,
    dtype_of: impl Fn(&ParameterSpec) -> DType,
    sink: &mut dyn WeightSink,
) -> Result<()> {
    if !sink.layout().receives {
        return Ok(());
    }
    let tensors = layout
        .parameters()
        .iter()
        .map(|spec| ParameterSpec {
            dtype: dtype_of(spec),
            ..spec.clone()
        })
        .collect();
    let manifest = WeightManifest { tensors, version };
    let sent = sink
        .begin(&manifest)
        .and_then(|()| send(layout, weights, &manifest.tensors, sink))
        .and_then(|()| sink.commit());
    if sent.is_err() {
        sink.abort();
    }
    sent
}

fn send(
    layout: &Layout,
    weights: &Buffers,
    specs: &[ParameterSpec],
    sink: &mut dyn WeightSink,
) -> Result<()> {
    let limit = sink.layout().bucket_bytes;
    let mut first = 0;
    while first < specs.len() {
        let mut bytes = 0;
        let fit = specs[first..].iter().take_while(|spec| {
            bytes += spec.num_elements() * spec.dtype.size();
            bytes <= limit
        });
        let count = fit.count().max(1);
        let values = (first..first + count)
            .map(|index| {
                let (bucket, part) = layout.place(index);
                Converted::new(
                    &weights.bucket(bucket)[part.range.clone()],
                    specs[index].dtype,
                )
            })
            .collect::<Result<Vec<_>>>()?;
        let slices: Vec<_> = specs[first..first + count]
            .iter()
            .zip(&values)
            .map(|(spec, values)| TensorSlice {
                name: &spec.name,
                shape: &spec.shape,
                slice: spec.shape.iter().map(|&n| 0..n).collect(),
                data: values.view(),
                scale: None,
            })
            .collect();
        sink.bucket(&slices)?;
        first += count;
    }
    Ok(())
}

enum Converted<'a> {
    F32(&'a [f32]),
    F64(Vec<f64>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
}

impl<'a> Converted<'a> {
    fn new(values: &'a [f32], dtype: DType) -> Result<Self> {
        Ok(match dtype {
            DType::F32 => Self::F32(values),
            DType::F64 => Self::F64(values.iter().map(|&x| x.into()).collect()),
            DType::Bf16 => Self::Bf16(values.iter().map(|&x| bf16::from_f32(x)).collect()),
            DType::F16 => Self::F16(values.iter().map(|&x| f16::from_f32(x)).collect()),
            DType::I64 | DType::I32 | DType::U8 => {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    "export_weights",
                    "weights are exported as f64, f32, bf16 or f16",
                )
                .with("found", dtype));
            }
        })
    }

    fn view(&self) -> View<'_> {
        match self {
            Self::F32(v) => (*v).into(),
            Self::F64(v) => v.into(),
            Self::Bf16(v) => v.into(),
            Self::F16(v) => v.into(),
        }
    }
}

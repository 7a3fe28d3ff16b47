//! Weights and gradients in and out, by Hugging Face names.

use std::sync::Arc;

use drivetrain_core::{
    DType, Result, View,
    engine::Weights,
    model::{ParameterKind, ParameterSpec},
    weights::{TensorSlice, WeightManifest, WeightSink, WeightSource},
};
use half::bf16;
use indexmap::IndexMap;

use super::{defect::Defect, engine::ReferenceEngine, matrix::Matrix, model::Parameters};

/// Reads every parameter, or fails with nothing changed.
pub(super) fn read(specs: &[ParameterSpec], source: &dyn WeightSource) -> Result<Parameters> {
    let mut weights = Parameters::new();
    for spec in specs {
        let matrix = Matrix::with_shape(&spec.shape, source.read_f64(&spec.name)?);
        weights.insert(spec.name.clone(), Arc::new(matrix));
    }
    Ok(weights)
}

pub(super) fn import(
    engine: &mut ReferenceEngine,
    which: &Weights,
    source: &dyn WeightSource,
) -> Result<()> {
    let specs = specs(engine);
    let read = read(&specs, source);
    let mut weights = engine.world.agree("import_weights", read)?;
    if engine.is(Defect::ImportSkipsNorms) {
        for spec in specs.iter().filter(|s| s.kind == ParameterKind::Norm) {
            weights[&spec.name] = engine.policy[&spec.name].clone();
        }
    }
    match which {
        Weights::Policy => engine.policy = weights,
        Weights::Tag(tag) => {
            engine.snapshots.insert(tag.clone(), weights);
        }
    }
    Ok(())
}

pub(super) fn export(
    engine: &ReferenceEngine,
    which: &Weights,
    sink: &mut dyn WeightSink,
) -> Result<()> {
    let weights = engine.weights(which)?;
    let rounded = engine.is(Defect::ExportRounded);
    stream(engine, sink, |name| {
        let values = &weights[name].data;
        if rounded {
            return values.iter().map(|&v| bf16::from_f64(v).to_f64()).collect();
        }
        values.clone()
    })
}

pub(super) fn export_gradients(engine: &ReferenceEngine, sink: &mut dyn WeightSink) -> Result<()> {
    let gradients: IndexMap<String, Matrix> = engine.reduced_gradients()?;
    stream(engine, sink, |name| gradients[name].data.clone())
}

fn specs(engine: &ReferenceEngine) -> Vec<ParameterSpec> {
    let planned = engine.plan.parameters.iter();
    planned.map(|p| p.spec.clone()).collect()
}

/// Sends full tensors as f64, in buckets of the size that the sink wants.
fn stream(
    engine: &ReferenceEngine,
    sink: &mut dyn WeightSink,
    values: impl Fn(&str) -> Vec<f64>,
) -> Result<()> {
    let layout = sink.layout();
    if !layout.receives {
        return Ok(());
    }
    let manifest = WeightManifest {
        tensors: specs(engine),
        version: engine.step,
    };
    let mut send = || {
        sink.begin(&manifest)?;
        let mut bucket: Vec<(&ParameterSpec, Vec<f64>)> = Vec::new();
        let mut bytes = 0;
        for spec in &manifest.tensors {
            let size = spec.num_elements() * DType::F64.size();
            if bytes + size > layout.bucket_bytes && !bucket.is_empty() {
                flush(sink, &mut bucket)?;
                bytes = 0;
            }
            bytes += size;
            bucket.push((spec, values(&spec.name)));
        }
        flush(sink, &mut bucket)?;
        sink.commit()
    };
    let sent = send();
    if sent.is_err() {
        sink.abort();
    }
    sent
}

fn flush(sink: &mut dyn WeightSink, bucket: &mut Vec<(&ParameterSpec, Vec<f64>)>) -> Result<()> {
    let slices: Vec<_> = bucket
        .iter()
        .map(|(spec, values)| TensorSlice {
            name: &spec.name,
            shape: &spec.shape,
            slice: spec.shape.iter().map(|&n| 0..n).collect(),
            data: View::F64(values),
            scale: None,
        })
        .collect();
    sink.bucket(&slices)?;
    bucket.clear();
    Ok(())
}

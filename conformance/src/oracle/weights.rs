//! Weights and gradients in and out, by Hugging Face names.

use std::sync::Arc;

use drivetrain_core::{
    DType, Result,
    engine::Weights,
    model::{ParameterKind, ParameterSpec},
    moe::ExpertBias,
    weights::{Masters, Streamer, WeightSink, WeightSource},
};
use half::bf16;
use indexmap::IndexMap;

use super::{
    defect::Defect,
    engine::ReferenceEngine,
    matrix::Matrix,
    model::{Parameters, Policy},
};

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
    let bias = ExpertBias::zeros(&engine.plan.model);
    if engine.is(Defect::ImportSkipsNorms) {
        for spec in specs.iter().filter(|s| s.kind == ParameterKind::Norm) {
            weights[&spec.name] = engine.policy.weights[&spec.name].clone();
        }
    }
    match which {
        Weights::Policy => engine.policy = Policy { weights, bias },
        Weights::Tag(tag) => {
            engine
                .snapshots
                .insert(tag.clone(), Policy { weights, bias });
        }
    }
    Ok(())
}

pub(super) fn export(
    engine: &ReferenceEngine,
    which: &Weights,
    sink: &mut dyn WeightSink,
) -> Result<()> {
    let weights = &engine.weights(which)?.weights;
    let rounded = engine.is(Defect::ExportRounded);
    stream(engine, sink, |name| {
        let values = weights[name].data.as_slice();
        match rounded {
            true => {
                let rounded = values.iter().map(|&v| bf16::from_f64(v).to_f64());
                Masters::from(rounded.collect::<Vec<_>>())
            }
            false => values.into(),
        }
    })
}

pub(super) fn export_gradients(engine: &ReferenceEngine, sink: &mut dyn WeightSink) -> Result<()> {
    let gradients: IndexMap<String, Matrix> = engine.reduced_gradients()?;
    stream(engine, sink, |name| gradients[name].data.as_slice().into())
}

fn specs(engine: &ReferenceEngine) -> Vec<ParameterSpec> {
    engine.plan.parameters.clone()
}

/// Sends every tensor as f64, whatever the job's dtypes say.
fn stream<'a>(
    engine: &ReferenceEngine,
    sink: &'a mut dyn WeightSink,
    values: impl Fn(&str) -> Masters<'a>,
) -> Result<()> {
    let mut tensors = specs(engine);
    let names: Vec<_> = tensors.iter().map(|spec| spec.name.clone()).collect();
    for spec in &mut tensors {
        spec.dtype = DType::F64;
    }
    let mut stream = Streamer::begin(sink, tensors, engine.step);
    for name in &names {
        stream.push(values(name));
    }
    let sent = stream.flush();
    stream.finish(sent)
}

//! Log-probs and entropies of given sequences under a model.

use std::sync::{Arc, Mutex, PoisonError};

use drivetrain_core::{
    Result,
    config::LoadedJob,
    engine::{Backend, ScoreRequest, WeightInit, build_engine},
    launch::run_ranks,
    plan::{MicrobatchLimit, plan_microbatches},
};
use drivetrain_data::{Dataset, DatasetOptions};
use serde::Serialize;

use super::{scores::global_scores, timeout, train::first_weights};

/// What to compute.
#[derive(Debug, Clone, PartialEq)]
pub struct ScoreOptions {
    /// Divides the logits.
    pub temperature: f64,
    /// Whether entropies are wanted.
    pub entropy: bool,
}

/// One sequence's scores, by token; the first token's are 0.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SequenceScores {
    /// `log p(token_t | tokens_<t)`.
    pub log_probs: Vec<f64>,
    /// In nats, where asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entropy: Option<Vec<f64>>,
}

/// Scores every sequence of the job's `data.train`, in the file's order, handing each to `sink` as its batch is
/// done.
///
/// # Errors
/// Those of data, files, engine and ranks.
pub fn score(
    job: &LoadedJob,
    backend: &dyn Backend,
    options: &ScoreOptions,
    sink: &mut (dyn FnMut(SequenceScores) -> Result<()> + Send),
) -> Result<usize> {
    let spec = &job.spec;
    let dataset = Arc::new(Dataset::open(
        &spec.config.data.train,
        &DatasetOptions::of_job(spec, &job.model_folder),
    )?);
    let weights = first_weights(job)?;
    let mesh = spec.mesh()?;
    let sink = Mutex::new(sink);
    let request = ScoreRequest {
        temperature: options.temperature,
        entropy: options.entropy,
        ..ScoreRequest::default()
    };
    run_ranks(mesh.world_size(), timeout(&spec.config), |world| {
        let init = WeightInit::Source(&*weights);
        let (mut engine, _) = build_engine(backend, spec, world.clone(), init)?;
        let limit = MicrobatchLimit::from_config(&spec.config.batch);
        for global in dataset.in_order(spec.config.batch.global_batch_size) {
            let global = global?;
            let plan =
                plan_microbatches(&global.lengths(), global.groups(), mesh.data_size(), limit)?;
            let (log_probs, entropies) =
                global_scores(&mut engine, &global, &plan, &mesh, &*world, &request)?;
            if world.rank() == 0 {
                let mut sink = sink.lock().unwrap_or_else(PoisonError::into_inner);
                for s in 0..global.num_sequences() {
                    let part = |values: &[f64]| values[global.sequence(s)].to_vec();
                    sink(SequenceScores {
                        log_probs: part(&log_probs),
                        entropy: options.entropy.then(|| part(&entropies)),
                    })?;
                }
            }
        }
        Ok(())
    })?;
    Ok(dataset.len())
}

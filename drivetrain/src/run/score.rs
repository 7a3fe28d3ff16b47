//! Log-probs and entropies of given sequences under a model.

use std::sync::{Mutex, PoisonError};

use drivetrain_core::{
    Error, ErrorKind, Result,
    config::{LoadedJob, Overlong},
    engine::{Backend, Engine, ScoreRequest, WeightInit, build_engine},
    launch::Ranks,
    plan::MicrobatchLimit,
};
use serde::Serialize;

use super::{open_data, timeout, train::first_weights};

/// What to compute.
#[derive(Debug, Clone)]
pub struct ScoreOptions {
    /// Divides the logits.
    pub temperature: f64,
    /// Whether entropies are wanted.
    pub entropy: bool,
    /// Where the ranks are.
    pub ranks: Ranks,
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

/// Scores every sequence of the job's `data.train`, in the file's order, handing each to rank 0's `sink` as its batch
/// is done. A line that is a pair is two sequences.
///
/// # Errors
/// `Config` if sequences may be left out; those of data, files, engine and ranks.
pub fn score(
    job: &LoadedJob,
    backend: &dyn Backend,
    options: &ScoreOptions,
    sink: &mut (dyn FnMut(SequenceScores) -> Result<()> + Send),
) -> Result<usize> {
    let spec = &job.spec;
    if spec.config.data.overlong == Overlong::Skip {
        let message =
            "a sequence that is left out would leave no row: rows would not be the data's";
        return Err(Error::new(ErrorKind::Config, "score", message)
            .with("found", "data.overlong: skip")
            .help("cut what is too long (data.overlong: truncate), or raise data.max_length"));
    }
    let ranks = &options.ranks;
    let inputs = open_data(job, &spec.config.data.train)
        .and_then(|dataset| Ok((dataset, first_weights(job)?)));
    let (dataset, weights) = ranks.agree("open_inputs", inputs)?;
    let mesh = spec.mesh()?;
    let sink = Mutex::new(sink);
    let request = ScoreRequest {
        temperature: options.temperature,
        entropy: options.entropy,
        ..ScoreRequest::default()
    };
    ranks.run(mesh.world_size(), timeout(&spec.config), |world| {
        let init = WeightInit::Source(&*weights);
        let (mut engine, plan) = build_engine(backend, spec, world.clone(), init)?;
        let limit = MicrobatchLimit::from_config(&spec.config.batch);
        for global in dataset.in_order(spec.config.batch.global_batch_size) {
            let global = global?;
            let cut = plan.cut(&global, limit)?;
            let share = cut.share(&global, plan.mesh.data_index(world.rank()))?;
            let own = engine.forward(&share, &request)?;
            let outputs = cut.gather(&global, &own, &plan.mesh, &*world)?;
            if world.rank() == 0 {
                let mut sink = sink.lock().unwrap_or_else(PoisonError::into_inner);
                for s in 0..global.num_sequences() {
                    let part = |values: &[f64]| values[global.sequence(s)].to_vec();
                    sink(SequenceScores {
                        log_probs: part(&outputs.log_probs),
                        entropy: outputs.entropy.as_deref().map(part),
                    })?;
                }
            }
        }
        Ok(())
    })?;
    Ok(dataset.len())
}

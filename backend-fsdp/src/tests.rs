//! What only this engine promises: how much is gathered at once, and that a rank at fault holds nobody up.

use std::time::Duration;

use drivetrain_conformance::fixture;
use drivetrain_core::{
    batch::{Batch, BatchBuilder, BatchTotals},
    config::{JobConfig, JobSpec, check_job},
    engine::{Backend, Engine, ScoreRequest, StepOptions, WeightInit},
    launch::run_ranks,
    model::{Family, ModelSpec},
    objective::Nll,
    plan::TrainPlan,
};

use crate::{Fsdp, engine::FsdpEngine, options::Options};

const TIMEOUT: Duration = Duration::from_secs(60);

fn plan(model: ModelSpec, num_ranks: usize) -> TrainPlan {
    let config: JobConfig = serde_json::from_value(serde_json::json!({
        "model": "fixture", "backend": "fsdp", "steps": 3, "output": "unused",
        "data": {"train": "unused"}, "batch": {"global_batch_size": 4},
        "parallel": {"data_parallel_size": num_ranks, "threads_per_rank": 1},
        "logits_budget_bytes": 65536,
    }))
    .unwrap();
    Fsdp.plan(&JobSpec { config, model }).unwrap()
}

fn share(model: &ModelSpec, rank: usize) -> Batch {
    let mut batch = BatchBuilder::new();
    for length in [7, 5] {
        let tokens = (0..length).map(|i| (i * 31 + rank as u32 * 7) % model.vocab_size as u32);
        batch.push(&tokens.collect::<Vec<_>>(), None).unwrap();
    }
    batch
        .build()
        .unwrap()
        .with_microbatches(vec![0, 1, 2])
        .unwrap()
}

fn totals() -> BatchTotals {
    BatchTotals {
        tokens: 20,
        sequences: 4,
        ..BatchTotals::default()
    }
}

/// One step of each of two ranks; what `look` sees in the engine after it.
fn step<T: Send>(options: Options, look: impl Fn(&FsdpEngine) -> T + Sync) -> Vec<T> {
    let model = fixture::dense(Family::Llama, 6);
    let plan = plan(model.clone(), 2);
    run_ranks(2, TIMEOUT, |world| {
        let batch = share(&model, world.rank());
        let mut engine = FsdpEngine::new(&plan, options, world, WeightInit::Seed(5))?;
        engine.forward_backward(&batch, &Nll::default(), &totals())?;
        engine.forward(&batch, &ScoreRequest::default())?;
        engine.optim_step(&StepOptions::default())?;
        Ok(look(&engine))
    })
    .unwrap()
}

#[test]
fn at_most_the_root_and_two_blocks_are_gathered_at_once() {
    let model = fixture::dense(Family::Llama, 6);
    let bytes = |layer: Option<usize>| {
        let specs = model.parameters();
        let of = specs.iter().filter(|s| s.layer == layer);
        4 * of.map(|s| s.num_elements() as u64).sum::<u64>()
    };
    for (units, peak_bytes, now) in step(Options::default(), |engine| {
        let residents = engine.residents();
        (
            residents.peak_units(),
            residents.peak_bytes(),
            residents.units(),
        )
    }) {
        assert!((2..=3).contains(&units), "{units}");
        assert!(
            peak_bytes <= bytes(None) + 2 * bytes(Some(0)),
            "{peak_bytes}"
        );
        assert_eq!(now, 0, "gathered units outlive the step");
    }
}

#[test]
fn without_resharding_every_block_stays_gathered_until_its_backward() {
    let options = Options {
        reshard_after_forward: false,
    };
    for units in step(options, |engine| engine.residents().peak_units()) {
        assert_eq!(units, 7);
    }
}

#[test]
fn an_option_that_is_not_known_is_refused_in_code_too() {
    let mut config = plan(fixture::dense(Family::Llama, 2), 1).config;
    let options = serde_json::json!({"reshard": true});
    config
        .backends
        .insert("fsdp".to_owned(), options.as_object().unwrap().clone());
    let model = fixture::dense(Family::Llama, 2);
    let faults = check_job(&JobSpec { config, model }, &Fsdp);
    let rules: Vec<_> = faults.iter().map(|f| f.rule).collect();
    assert_eq!(rules, ["FSDP-01"]);
}

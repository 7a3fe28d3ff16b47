//! What only this engine promises: how much is gathered at once, what is under way while something is computed, and what
//! each option costs and leaves alone.

use std::{sync::Arc, time::Duration};

use drivetrain_conformance::fixture;
use drivetrain_core::{
    ErrorKind,
    batch::{Batch, BatchBuilder, BatchTotals},
    communicator::{Intercepted, Recorder},
    config::{DeviceConfig, JobConfig, JobSpec, check_job},
    engine::{Backend, Engine, ScoreRequest, StepOptions, WeightInit, Weights},
    launch::run_ranks,
    model::{Family, ModelSpec},
    objective::Nll,
    plan::TrainPlan,
    weights::MemoryWeights,
};

use crate::{
    Fsdp,
    engine::FsdpEngine,
    options::{Options, Reshard},
    sharding::Event,
};

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

fn model() -> ModelSpec {
    fixture::dense(Family::Llama, 6)
}

/// One step of each rank; what `look` sees in the engine after it, and what passed through its communicators.
fn step<T: Send>(
    options: Options,
    num_ranks: usize,
    look: impl Fn(&mut FsdpEngine, &Recorder) -> T + Sync,
) -> Vec<T> {
    let plan = plan(model(), num_ranks);
    run_ranks(num_ranks, TIMEOUT, |world| {
        let batch = share(&plan.model, world.rank());
        let recorder = Arc::new(Recorder::default());
        let world = Arc::new(Intercepted::new(world, recorder.clone()));
        let mut engine = FsdpEngine::new(&plan, options, world, WeightInit::Seed(5))?;
        engine.forward_backward(&batch, &Nll::default(), &totals())?;
        engine.forward(&batch, &ScoreRequest::default())?;
        engine.optim_step(&StepOptions::default())?;
        Ok(look(&mut engine, &recorder))
    })
    .unwrap()
}

fn weights(engine: &mut FsdpEngine) -> Vec<Vec<f64>> {
    let mut sink = MemoryWeights::new();
    engine.export_weights(&Weights::Policy, &mut sink).unwrap();
    sink.iter().map(|(_, _, values)| values.to_vec()).collect()
}

/// Bytes of a gathered unit.
fn bytes(layer: Option<usize>) -> u64 {
    let specs = model().parameters();
    let of = specs.iter().filter(|s| s.layer == layer);
    4 * of.map(|s| s.num_elements() as u64).sum::<u64>()
}

#[test]
fn at_most_the_root_and_two_blocks_are_gathered_at_once() {
    for (prefetch, blocks) in [(0, 1), (1, 2), (2, 3)] {
        let options = Options {
            prefetch,
            ..Options::default()
        };
        for (peak, peak_bytes, now) in step(options, 2, |engine, _| {
            let residents = engine.residents();
            (
                residents.peak_units(),
                residents.peak_bytes(),
                residents.units(),
            )
        }) {
            assert_eq!(peak, 1 + blocks, "prefetch {prefetch}");
            assert_eq!(peak_bytes, bytes(None) + blocks as u64 * bytes(Some(0)));
            assert_eq!(now, 0, "gathered units outlive the step");
        }
    }
}

#[test]
fn without_resharding_every_block_stays_gathered_until_its_backward() {
    let options = Options {
        reshard_after_forward: Reshard::All(false),
        ..Options::default()
    };
    for units in step(options, 2, |engine, _| engine.residents().peak_units()) {
        assert_eq!(units, 7);
    }
}

/// With prefetch the next unit's gather starts before this one is computed and is waited for after, in both directions,
/// and so with the reduction of the one before; without it, each is waited for at once.
#[test]
fn communication_is_under_way_while_a_block_is_computed() {
    let order = |prefetch| {
        let options = Options {
            prefetch,
            ..Options::default()
        };
        let events = step(options, 2, |engine, _| engine.residents().events());
        events.into_iter().next().unwrap()
    };
    let first = |events: &[(Event, usize)], event| {
        events.iter().position(|e| *e == event).expect("it happens")
    };
    let (ahead, at_once) = (order(1), order(0));
    for unit in 1..6 {
        for (events, under_way) in [(&ahead, true), (&at_once, false)] {
            let at = |event, unit| first(events, (event, unit));
            let computed = at(Event::Forward, unit);
            assert_eq!(at(Event::Gather, unit + 1) < computed, under_way);
            assert!(computed < at(Event::Gathered, unit + 1));
            // From here on, back: the last block was never freed.
            let back = &events[at(Event::Forward, 6)..];
            let at = |event, unit| first(back, (event, unit));
            let computed = at(Event::Backward, unit + 1);
            assert_eq!(at(Event::Gather, unit) < computed, under_way);
            assert!(computed < at(Event::Gathered, unit));
            let computed = at(Event::Backward, unit);
            assert!(at(Event::Reduce, unit + 1) < computed);
            assert_eq!(at(Event::Reduced, unit + 1) > computed, under_way);
        }
    }
}

/// The numbers are the same bits, whatever is kept, freed, cut over fewer ranks or fetched ahead; parameters of this
/// model have rows that four ranks do not divide, and fewer rows than ranks.
#[test]
fn what_is_kept_and_fetched_changes_no_bit() {
    let trained = |reshard_after_forward, prefetch| {
        let options = Options {
            reshard_after_forward,
            prefetch,
            ..Options::default()
        };
        step(options, 4, |engine, _| weights(engine))
    };
    let expected = trained(Reshard::All(true), 0);
    assert!(expected.iter().all(|of_rank| *of_rank == expected[0]));
    for reshard in [Reshard::All(true), Reshard::All(false), Reshard::Group(2)] {
        for prefetch in [0, 1, 3, 100] {
            assert!(
                trained(reshard, prefetch) == expected,
                "{reshard:?} {prefetch}"
            );
        }
    }
}

/// Gathers and reductions of a step of two micro-batches, and of a pass that scores them: seven units each.
#[test]
fn each_option_costs_the_communication_that_it_says() {
    let calls = |reshard_after_forward, accumulate_unsharded| {
        let options = Options {
            reshard_after_forward,
            accumulate_unsharded,
            ..Options::default()
        };
        let stats = step(options, 4, |_, recorder| recorder.stats());
        let of = |label: &str, operation| {
            let key = (label.to_owned(), operation);
            stats[0].get(&key).map_or((0, 0), |s| (s.calls, s.bytes))
        };
        let (again, bytes_again) = of("post_forward", "all_gather");
        assert_eq!(bytes_again, again * bytes(Some(0)));
        let (gathers, _) = of("data_shard", "all_gather");
        (gathers, again, of("data_shard", "reduce_scatter").0)
    };
    assert_eq!(
        calls(Reshard::All(true), false),
        (2 * 7 + 2 * (7 + 5), 0, 2 * 7)
    );
    assert_eq!(calls(Reshard::All(false), false), (2 * 7 + 2 * 7, 0, 2 * 7));
    assert_eq!(
        calls(Reshard::Group(2), false),
        (2 * 7 + 2 * 7, 2 * 5, 2 * 7)
    );
    assert_eq!(calls(Reshard::All(true), true), (2 * 7 + 2 * (7 + 5), 0, 7));
}

#[test]
fn a_number_of_ranks_to_reshard_over_divides_those_of_a_shard_group() {
    let faults = |reshard: serde_json::Value, replicas: usize| {
        let mut config = plan(model(), 4).config;
        config.parallel.data_replicate_size = replicas;
        let options = serde_json::json!({"reshard_after_forward": reshard});
        let options = options.as_object().unwrap().clone();
        config.backends.insert("fsdp".to_owned(), options);
        let faults = check_job(
            &JobSpec {
                config,
                model: model(),
            },
            &Fsdp,
        );
        faults.iter().map(|f| f.rule).collect::<Vec<_>>()
    };
    for legal in [true.into(), false.into(), 1.into(), 2.into(), 4.into()] {
        assert!(faults(legal, 1).is_empty());
    }
    for other in [3, 8] {
        assert_eq!(faults(other.into(), 1), ["FSDP-02"]);
    }
    assert_eq!(faults(4.into(), 2), ["FSDP-02"]);
    for wrong in [serde_json::json!(0), "two".into(), 1.5.into()] {
        assert_eq!(faults(wrong, 1).len(), 1);
    }
}

#[test]
fn a_gpu_without_cuda_in_libtorch_is_refused_with_a_remedy() {
    let mut config = plan(model(), 1).config;
    config.device = DeviceConfig::Cuda;
    let opened = crate::device::open(&config, 0).map(drop);
    let job = JobSpec {
        config,
        model: model(),
    };
    let faults = check_job(&job, &Fsdp);
    let rules: Vec<_> = faults.iter().map(|f| f.rule).collect();
    match tch::utils::has_cudart() {
        true => assert!(rules.is_empty(), "{rules:?}"),
        false => {
            let opened = opened.unwrap_err();
            assert_eq!(opened.kind(), ErrorKind::Device);
            assert!(opened.to_string().contains("LIBTORCH"), "{opened}");
            assert_eq!(rules, ["DEV-01"]);
            assert!(faults[0].remedy.contains("libraries that have it"));
        }
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

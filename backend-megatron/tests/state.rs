//! Scoring, export, memory, and the plan.

mod common;

use common::{batch, engine, job, model, on_ranks, share, train, weights};
use drivetrain_core::{
    DType,
    engine::{Backend, Engine, ScoreRequest, StepOptions, Weights},
    model::Family,
    objective::Nll,
    plan::MicrobatchLimit,
    weights::{MemoryWeights, WeightSink, WeightSource},
};
use drivetrain_megatron::Megatron;

const LIMIT: MicrobatchLimit = MicrobatchLimit::Sequences(2);

#[test]
fn scores_keep_the_order_cover_all_but_first_tokens_and_do_not_depend_on_the_budget() {
    let mut job = job(model(Family::Qwen3), 1);
    let start = weights(&job.model);
    let mut score = |budget, cuts: &[usize]| {
        job.config.logits_budget_bytes = budget;
        on_ranks(1, |world| {
            let batch = batch().with_microbatches(cuts.to_vec())?;
            let request = ScoreRequest {
                temperature: 0.5,
                entropy: true,
                ..ScoreRequest::default()
            };
            engine(&job, world, &start)?.forward(&batch, &request)
        })
    };
    let whole = score(1 << 20, &[0, 5]);
    let starts = batch().starts().to_vec();
    for (t, log_prob) in whole.log_probs.iter().enumerate() {
        assert_eq!(
            *log_prob == 0.0,
            starts.contains(&t),
            "token {t}: {log_prob}"
        );
    }
    let cut = score(97 * 8, &[0, 1, 1, 4, 5]);
    let close = |a: &[f64], b: &[f64]| {
        assert_eq!(a.len(), b.len());
        a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-5)
    };
    assert!(close(&whole.log_probs, &cut.log_probs));
    assert!(close(&whole.entropy.unwrap(), &cut.entropy.unwrap()));
}

#[test]
fn weights_that_went_in_come_out_in_order_and_dtype() {
    let mut model = model(Family::Qwen2);
    model.dtype = DType::Bf16;
    let job = job(model.clone(), 1);
    let mut start = MemoryWeights::new();
    for (name, shape, values) in weights(&model).iter() {
        let rounded = values
            .iter()
            .map(|&v| half::bf16::from_f64(v).to_f64())
            .collect();
        start.insert(name, shape, DType::Bf16, rounded).unwrap();
    }
    let out = on_ranks(1, |world| {
        let mut out = MemoryWeights::new();
        engine(&job, world, &start)?.export_weights(&Weights::Policy, &mut out)?;
        Ok(out)
    });
    assert!(out.is_committed());
    let names: Vec<_> = model.parameters().into_iter().map(|p| p.name).collect();
    assert_eq!(out.names(), names);
    for (name, _, values) in start.iter() {
        assert_eq!(out.values(name), Some(values));
        assert_eq!(out.describe(name).unwrap().1, DType::Bf16);
    }
}

#[test]
fn a_step_of_the_same_shape_needs_no_more_memory_than_the_first() {
    let job = job(model(Family::Llama), 1);
    let start = weights(&job.model);
    on_ranks(1, |world| {
        let (share, totals) = share(&batch(), 1, 0, LIMIT);
        let mut engine = engine(&job, world, &start)?;
        let mut peaks = Vec::new();
        for _ in 0..3 {
            engine.forward_backward(&share, &Nll::default(), &totals)?;
            engine.optim_step(&StepOptions::default())?;
            peaks.push(engine.memory().peak_activations);
        }
        assert!(peaks[0] > 0);
        assert_eq!(peaks, [peaks[0]; 3]);
        Ok(())
    });
}

#[test]
fn the_optimizer_is_sharded_over_ranks() {
    let train = |ranks| {
        let job = job(model(Family::Llama), ranks);
        let start = weights(&job.model);
        on_ranks(ranks, |world| Ok(engine(&job, world, &start)?.memory()))
    };
    let (one, four) = (train(1), train(4));
    assert_eq!(four.parameters, one.parameters);
    assert_eq!(one.optimizer, 2 * one.parameters);
    assert!(
        four.optimizer.abs_diff(one.optimizer / 4) <= 64,
        "{} of {}",
        four.optimizer,
        one.optimizer
    );
}

#[test]
fn the_plan_counts_what_the_engine_multiplies() {
    let mut job = job(model(Family::Llama), 2);
    job.config.data.max_length = Some(16);
    job.config.batch.micro_batch_size = Some(1);
    let plan = Megatron.plan(&job).unwrap();
    assert_eq!(plan.reference_tokens, 16);
    assert_eq!(plan.parameters.len(), job.model.parameters().len());
    let gemm: usize = plan
        .ops
        .iter()
        .filter(|op| op.kind == "gemm")
        .map(|op| op.m * op.n * op.k)
        .sum();
    let matrices: usize = job
        .model
        .parameters()
        .iter()
        .filter(|p| p.shape.len() == 2 && p.name != "model.embed_tokens.weight")
        .map(|p| p.num_elements())
        .sum();
    assert_eq!(gemm, 16 * matrices);
    let bytes = |operation: &str| -> u64 {
        let planned = plan.collectives.iter().filter(|c| c.operation == operation);
        planned.map(|c| c.bytes * c.count as u64).sum()
    };
    let parameters = 4 * job.model.num_parameters() as u64;
    assert_eq!(
        (bytes("reduce_scatter"), bytes("all_gather")),
        (parameters, parameters)
    );
}

#[test]
fn a_sink_that_wants_nothing_gets_nothing() {
    #[derive(Debug)]
    struct Deaf;
    impl WeightSink for Deaf {
        fn layout(&self) -> drivetrain_core::weights::SinkLayout {
            drivetrain_core::weights::SinkLayout {
                receives: false,
                ..Default::default()
            }
        }
        fn begin(
            &mut self,
            _: &drivetrain_core::weights::WeightManifest,
        ) -> drivetrain_core::Result<()> {
            panic!("begin")
        }
        fn bucket(
            &mut self,
            _: &[drivetrain_core::weights::TensorSlice<'_>],
        ) -> drivetrain_core::Result<()> {
            panic!("bucket")
        }
        fn commit(&mut self) -> drivetrain_core::Result<()> {
            panic!("commit")
        }
        fn abort(&mut self) {
            panic!("abort")
        }
    }
    let run = train(&job(model(Family::Llama), 1), LIMIT, &Nll::default(), 1);
    assert!(run.weights.is_committed());
    let job = job(model(Family::Llama), 1);
    let start = weights(&job.model);
    on_ranks(1, |world| {
        engine(&job, world, &start)?.export_weights(&Weights::Policy, &mut Deaf)
    });
}

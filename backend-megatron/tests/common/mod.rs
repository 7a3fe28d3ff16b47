//! Tiny models and batches, and a rank-by-rank run of steps.
#![allow(dead_code)] // each test file uses a part

use std::{sync::Arc, time::Duration};

use drivetrain_core::{
    DType, Result,
    batch::{Batch, BatchBuilder, BatchTotals},
    communicator::Communicator,
    config::{JobConfig, JobSpec},
    engine::{Engine, Guarded, OptimReport, StepOptions, WeightInit, Weights, build_engine},
    launch::run_ranks,
    model::{Family, LayerSpec, MlpSpec, ModelSpec, RopeScaling, RopeSpec},
    objective::Objective,
    plan::{MicrobatchLimit, plan_microbatches},
    weights::MemoryWeights,
};
use drivetrain_megatron::Megatron;
use serde_json::json;

/// hidden 32, 3 layers, 4 query heads on 2, ffn 48, vocab 97; the families' own traits switched on.
pub(crate) fn model(family: Family) -> ModelSpec {
    let window = (family == Family::Mistral).then_some(3);
    let layer = LayerSpec {
        sliding_window: window,
        mlp: MlpSpec::Dense { ffn_size: 48 },
    };
    ModelSpec {
        family,
        vocab_size: 97,
        hidden_size: 32,
        num_heads: 4,
        num_kv_heads: 2,
        head_dim: if family == Family::Qwen3 { 16 } else { 8 },
        rms_norm_eps: 1e-5,
        rope: RopeSpec {
            theta: 10_000.0,
            scaling: RopeScaling::None,
        },
        max_position_embeddings: 64,
        tied_embeddings: family == Family::Qwen2,
        qkv_bias: family == Family::Qwen2,
        qk_norm: family == Family::Qwen3,
        layers: vec![layer; 3],
        moe: None,
        dtype: DType::F32,
        config: serde_json::Map::new(),
    }
}

/// A job over `ranks` data-parallel ranks.
pub(crate) fn job(model: ModelSpec, ranks: usize) -> JobSpec {
    let config = json!({
        "model": "tiny", "backend": "megatron", "steps": 10, "output": "out",
        "data": {"train": "train.jsonl"},
        "batch": {"global_batch_size": 5},
        "optimizer": {"learning_rate": 1e-3},
        "parallel": {"data_parallel_size": ranks, "threads_per_rank": 1},
    });
    let config: JobConfig = serde_json::from_value(config).unwrap();
    JobSpec { config, model }
}

/// Weights that show swaps: matrices of std 0.2, norms between 0.5 and 1.5, biases not 0.
pub(crate) fn weights(model: &ModelSpec) -> MemoryWeights {
    let mut weights = MemoryWeights::new();
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut uniform = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f64 / (1u64 << 24) as f64
    };
    for spec in model.parameters() {
        let values = (0..spec.num_elements())
            .map(|_| match spec.shape.len() {
                1 if spec.name.contains("norm") => 0.5 + uniform(),
                _ => 0.35 * (2.0 * uniform() - 1.0),
            })
            .map(|v| f64::from(v as f32))
            .collect();
        weights
            .insert(&spec.name, &spec.shape, DType::F32, values)
            .unwrap();
    }
    weights
}

/// Lengths 3, 7, 12, 5, 1 with 1, 4, 9, 0, 0 scored tokens.
pub(crate) fn batch() -> Batch {
    let mut builder = BatchBuilder::new();
    let mut id = 11u32;
    for (length, scored) in [(3, 1), (7, 4), (12, 9), (5, 0), (1, 0)] {
        let tokens: Vec<u32> = (0..length)
            .map(|_| {
                id = (id * 31 + 17) % 97;
                id
            })
            .collect();
        let mask: Vec<bool> = (0..length).map(|t| t >= length - scored).collect();
        builder.push(&tokens, Some(&mask)).unwrap();
    }
    builder.build().unwrap()
}

/// This rank's share of a batch and the totals of the whole.
pub(crate) fn share(
    batch: &Batch,
    ranks: usize,
    rank: usize,
    limit: MicrobatchLimit,
) -> (Batch, BatchTotals) {
    let plan = plan_microbatches(&batch.lengths(), batch.groups(), ranks, limit, 1).unwrap();
    (plan.share(batch, rank).unwrap(), BatchTotals::count(batch))
}

/// An engine on these weights.
pub(crate) fn engine(
    job: &JobSpec,
    world: Arc<dyn Communicator>,
    weights: &MemoryWeights,
) -> Result<Guarded> {
    let (engine, _) = build_engine(&Megatron, job, world, WeightInit::Source(weights))?;
    Ok(engine)
}

/// Runs `body` on every rank and gives what rank 0 returned.
pub(crate) fn on_ranks<T: Send>(
    ranks: usize,
    body: impl Fn(Arc<dyn Communicator>) -> Result<T> + Sync,
) -> T {
    let mut all = run_ranks(ranks, Duration::from_secs(60), body).unwrap();
    all.remove(0)
}

/// What some steps left.
#[derive(Debug, Clone)]
pub(crate) struct Run {
    pub(crate) losses: Vec<f64>,
    pub(crate) reports: Vec<OptimReport>,
    pub(crate) gradients: MemoryWeights,
    pub(crate) weights: MemoryWeights,
}

/// Takes `steps` steps on the same batch.
pub(crate) fn train(
    job: &JobSpec,
    limit: MicrobatchLimit,
    objective: &dyn Objective,
    steps: usize,
) -> Run {
    let ranks = job.config.parallel.data_parallel_size;
    let (start, global) = (weights(&job.model), batch());
    on_ranks(ranks, |world| {
        let (share, totals) = share(&global, ranks, world.rank(), limit);
        let mut engine = engine(job, world, &start)?;
        let mut run = Run {
            losses: Vec::new(),
            reports: Vec::new(),
            gradients: MemoryWeights::new(),
            weights: MemoryWeights::new(),
        };
        for step in 0..steps {
            run.losses
                .push(engine.forward_backward(&share, objective, &totals)?.loss);
            if step == 0 {
                engine.export_gradients(&mut run.gradients)?;
            }
            run.reports
                .push(engine.optim_step(&StepOptions::default())?);
        }
        engine.export_weights(&Weights::Policy, &mut run.weights)?;
        Ok(run)
    })
}

/// Fails where two sets of tensors differ by more than `tolerance` of each tensor's largest magnitude.
pub(crate) fn assert_close(
    what: &str,
    found: &MemoryWeights,
    expected: &MemoryWeights,
    tolerance: f64,
) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (name, _, want) in expected.iter() {
        let got = found.values(name).unwrap();
        assert_eq!(got.len(), want.len(), "{what}: {name}");
        let scale = want.iter().fold(1e-30, |m: f64, v| m.max(v.abs()));
        for (i, (g, w)) in got.iter().zip(want).enumerate() {
            let gap = (g - w).abs() / scale;
            assert!(gap <= tolerance, "{what}: {name}[{i}] is {g}, expected {w}");
        }
    }
}

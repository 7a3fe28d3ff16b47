//! The same training step under any engine, measured: sizes, batches, and the run.
#![forbid(unsafe_code)]

use std::{
    sync::{Arc, Barrier},
    time::{Duration, Instant},
};

use drivetrain::{
    backend,
    core::{
        Error, ErrorKind, Result,
        batch::{Batch, BatchBuilder, BatchTotals},
        config::{JobConfig, JobSpec},
        engine::{Engine, StepOptions, WeightInit, build_engine},
        launch::run_ranks,
        metrics::{peak_resident_bytes, process_cpu_seconds},
        model::{MlpSpec, ModelSpec},
        objective::Nll,
        plan::MicrobatchLimit,
    },
    kernels::{
        Cpu,
        ops::gemm::{Gemm, gemm},
    },
};
use serde::Serialize;
use serde_json::{Value, json};

/// A model and the lengths of the sequences of one step. A sequence of n scored tokens has n + 1 tokens.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    /// Its name.
    pub name: &'static str,
    layers: usize,
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    ffn: usize,
    vocab: usize,
    /// Scored tokens of each sequence.
    pub scored: &'static [usize],
}

/// The sizes of the peers' scripts.
pub const SIZES: [Size; 3] = [
    Size {
        name: "tiny",
        layers: 4,
        hidden: 256,
        heads: 8,
        kv_heads: 4,
        ffn: 688,
        vocab: 4096,
        scored: &[256; 8],
    },
    Size {
        name: "small",
        layers: 8,
        hidden: 512,
        heads: 8,
        kv_heads: 4,
        ffn: 1376,
        vocab: 8192,
        scored: &[512; 4],
    },
    Size {
        name: "ragged",
        layers: 8,
        hidden: 512,
        heads: 8,
        kv_heads: 4,
        ffn: 1376,
        vocab: 8192,
        scored: &[512, 60, 130, 300, 90, 220, 40, 180],
    },
];

/// What a step costs.
#[derive(Debug, Clone, Serialize)]
pub struct StepCost {
    /// Engine.
    pub backend: String,
    /// Settings beside the size's own.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub mode: String,
    /// Size.
    pub size: String,
    /// Ranks.
    pub ranks: usize,
    /// Threads a rank.
    pub threads: usize,
    /// Median wall milliseconds.
    pub ms_step: f64,
    /// Median CPU seconds of all ranks.
    pub cpu_s_step: f64,
    /// Peak resident MiB of the process over its ranks.
    pub mb_rank: Option<f64>,
    /// Model FLOPs a CPU second over the GEMM rate of one core measured in the same run, at one shape that suits it.
    pub mfu_core: f64,
    /// The same over the rate that the GEMM library reaches on the step's own products, with all ranks at work.
    pub mfu_library: f64,
    /// Loss of the first step.
    pub loss: f64,
    /// Steps that were timed.
    pub steps: usize,
}

impl Size {
    /// By name.
    pub fn named(name: &str) -> Option<Self> {
        SIZES.into_iter().find(|s| s.name == name)
    }

    /// The job: f32, AdamW, clipping at 1, NLL over all tokens, and `sets`: `key.path=value` each.
    ///
    /// # Errors
    /// `Config` for settings that no job has.
    pub fn job(
        &self,
        backend: &str,
        ranks: usize,
        threads: usize,
        sets: &[String],
    ) -> Result<JobSpec> {
        let longest = self.scored.iter().max().copied().unwrap_or(1) + 1;
        let model = ModelSpec::from_hf_config(
            &json!({
                "model_type": "llama",
                "vocab_size": self.vocab,
                "hidden_size": self.hidden,
                "intermediate_size": self.ffn,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "num_key_value_heads": self.kv_heads,
                "max_position_embeddings": longest,
                "rms_norm_eps": 1e-5,
                "rope_theta": 10000.0,
                "tie_word_embeddings": false,
                "hidden_act": "silu",
            })
            .to_string(),
            "benchmark".as_ref(),
        )?;
        let mut config = json!({
            "model": "benchmark",
            "backend": backend,
            "from_scratch": true,
            "steps": 1000,
            "output": "benchmark",
            "data": { "train": "benchmark.jsonl" },
            "batch": { "global_batch_size": self.scored.len() },
            "optimizer": { "learning_rate": 3e-4, "weight_decay": 0.1 },
            "parallel": { "data_parallel_size": ranks, "threads_per_rank": threads },
        });
        sets.iter().try_for_each(|text| set(&mut config, text))?;
        let config: JobConfig = serde_json::from_value(config).map_err(|cause| {
            let message = "the benchmark's settings make no job";
            Error::new(ErrorKind::Config, "make_job", message)
                .with("settings", sets.join(" "))
                .caused_by(cause)
        })?;
        Ok(JobSpec { config, model })
    }

    /// The global batch: tokens from a counter, all scored but the first of each sequence.
    pub fn batch(&self) -> Result<Batch> {
        let mut builder = BatchBuilder::new();
        let mut state = 7u64;
        for &scored in self.scored {
            let tokens: Vec<u32> = (0..=scored)
                .map(|_| {
                    state = state
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    ((state >> 33) % self.vocab as u64) as u32
                })
                .collect();
            builder.push(&tokens, None)?;
        }
        builder.build()
    }
}

/// Writes `key.path=value` into a job; what is not JSON is text.
fn set(config: &mut Value, text: &str) -> Result<()> {
    let found = text.split_once('=').filter(|(path, _)| !path.is_empty());
    let Some((path, value)) = found else {
        let message = "a setting without a key and `=`: write `--set key.path=value`";
        return Err(Error::new(ErrorKind::Config, "make_job", message).with("found", text));
    };
    let mut at = config;
    for key in path.split('.') {
        if !at.is_object() {
            *at = json!({});
        }
        at = &mut at[key];
    }
    *at = serde_json::from_str(value).unwrap_or_else(|_| value.into());
    Ok(())
}

/// Runs steps of an engine on thread ranks; `each` gets the wall time and CPU seconds of every step on rank 0.
/// Steps begin and end together over the ranks.
///
/// # Errors
/// The engine's.
pub fn run_steps(
    size: Size,
    backend_name: &str,
    ranks: usize,
    threads: usize,
    sets: &[String],
    steps: usize,
) -> Result<(f64, Vec<(Duration, f64)>)> {
    let backend = backend(backend_name)?;
    let job = size.job(backend_name, ranks, threads, sets)?;
    let batch = size.batch()?;
    let totals = BatchTotals::count(&batch);
    let objective = Nll::default();
    let results = run_ranks(ranks, Duration::from_secs(600), |world| {
        let (mut engine, plan) =
            build_engine(&*backend, &job, Arc::clone(&world), WeightInit::Seed(1234))?;
        let cut = plan.cut(&batch, MicrobatchLimit::All)?;
        let share = cut.share(&batch, plan.mesh.data_index(world.rank()))?;
        let mut loss = 0.0;
        let mut costs = Vec::with_capacity(steps);
        for step in 0..steps {
            world.barrier()?;
            let (cpu, began) = (process_cpu_seconds(), Instant::now());
            let report = engine.forward_backward(&share, &objective, &totals)?;
            engine.optim_step(&StepOptions::default())?;
            world.barrier()?;
            costs.push((began.elapsed(), process_cpu_seconds() - cpu));
            if step == 0 {
                loss = report.loss;
            }
        }
        Ok((loss, costs))
    })?;
    Ok(results.into_iter().next().unwrap_or_default())
}

/// Measures an engine: `warmup` steps, then `steps` whose medians count.
///
/// # Errors
/// The engine's.
pub fn measure(
    size: Size,
    backend: &str,
    ranks: usize,
    threads: usize,
    sets: &[String],
    warmup: usize,
    steps: usize,
) -> Result<StepCost> {
    let core = drivetrain::kernels::measure_peak_flops(1);
    let (loss, costs) = run_steps(size, backend, ranks, threads, sets, warmup + steps)?;
    let timed = &costs[warmup..];
    let cpu = median(timed.iter().map(|c| c.1));
    let job = size.job(backend, ranks, threads, sets)?;
    let flops = job.model.train_flops(&size.batch()?.lengths());
    Ok(StepCost {
        backend: backend.to_owned(),
        mode: sets.join(" "),
        size: size.name.to_owned(),
        ranks,
        threads,
        ms_step: median(timed.iter().map(|c| c.0.as_secs_f64())) * 1e3,
        cpu_s_step: cpu,
        mb_rank: peak_resident_bytes().map(|b| b as f64 / f64::from(1 << 20)),
        mfu_core: flops / cpu / core,
        mfu_library: flops / cpu / library_rate(&job, &size.batch()?, ranks, threads)?,
        loss,
        steps,
    })
}

/// How often the library's products are timed.
const REPEATS: usize = 3;

/// FLOPs a CPU second of the GEMM library alone: every rank at once makes the products of one layer and of the head,
/// forward and the two of backward, as often as the step does, out of buffers that stay in place.
fn library_rate(job: &JobSpec, batch: &Batch, ranks: usize, threads: usize) -> Result<f64> {
    let (model, cpu) = (&job.model, Cpu::new(threads));
    let tokens = batch.num_tokens() / ranks;
    let scored = batch.scored().iter().filter(|&&s| s).count() / ranks;
    let ffn = match model.layers.first().map(|layer| layer.mlp) {
        Some(MlpSpec::Dense { ffn_size }) => ffn_size,
        _ => {
            let message = "the benchmark's models are dense";
            return Err(Error::new(ErrorKind::Defect, "measure_gemm", message));
        }
    };
    let (hidden, heads) = (model.hidden_size, model.num_heads * model.head_dim);
    let qkv = heads + 2 * model.num_kv_heads * model.head_dim;
    let layers = model.num_layers();
    // Rows, outputs, inputs, and how often.
    let products = [
        (tokens, qkv, hidden, layers),
        (tokens, hidden, heads, layers),
        (tokens, 2 * ffn, hidden, layers),
        (tokens, hidden, ffn, layers),
        (scored, model.vocab_size, hidden, 1),
    ];
    let steps = Barrier::new(ranks + 1);
    let rank = || {
        // Written, so that no page is new to the products.
        let full = |len: usize| vec![0.5_f32; len];
        let mut operands = products.map(|(rows, outputs, inputs, _)| {
            let inner = [rows * inputs, outputs * inputs, rows * outputs].map(full);
            (inner.clone(), inner)
        });
        for _ in 0..REPEATS {
            steps.wait();
            for ((rows, outputs, inputs, times), (given, made)) in
                products.iter().zip(&mut operands)
            {
                let ([x, w, dy], [dx, dw, y]) = (&*given, made);
                for _ in 0..*times {
                    gemm(cpu, &Gemm::nt(*rows, *outputs, *inputs), x, w, y);
                    gemm(cpu, &Gemm::nn(*rows, *inputs, *outputs), dy, w, dx);
                    gemm(cpu, &Gemm::tn(*outputs, *inputs, *rows), dy, x, dw);
                }
            }
            steps.wait();
        }
    };
    let flops: usize = products
        .iter()
        .map(|(rows, outputs, inputs, times)| 6 * rows * outputs * inputs * times)
        .sum();
    let seconds = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..ranks).map(|_| scope.spawn(rank)).collect();
        let timed = (0..REPEATS).map(|_| {
            steps.wait();
            let before = process_cpu_seconds();
            steps.wait();
            process_cpu_seconds() - before
        });
        let timed: Vec<f64> = timed.collect();
        drop(workers);
        timed
    });
    Ok((flops * ranks) as f64 / median(seconds.into_iter()))
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

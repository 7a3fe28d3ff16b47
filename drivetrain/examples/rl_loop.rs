//! Online RL in one file: a policy samples answers, a rule rewards them, GRPO trains it. What a framework does with
//! the contract, on a task small enough to watch: of a prompt `[a, b]`, answer `a`.
//!
//! Every rank runs the loop, SPMD. `cargo run --release -p drivetrain --example rl_loop -- fsdp`

use std::{path::Path, time::Duration};

use drivetrain::core::{
    Result,
    batch::{Batch, BatchBuilder, BatchTotals, Column, ColumnData},
    config::{JobConfig, JobSpec, ObjectiveConfig, ObjectiveKind},
    engine::{Engine, ScoreRequest, StepOptions, WeightInit, build_engine},
    launch::run_ranks,
    model::ModelSpec,
    objective::{self, Objective, REWARDS},
    plan::MicrobatchLimit,
    trainer::complete,
    weights::SeededWeights,
};

const VOCAB: u32 = 8;
const PROMPTS: usize = 16;
/// Answers to each prompt: a group, whose rewards are compared with each other.
const ANSWERS: usize = 8;
const CONFIG: &str = r#"{
    "model_type": "llama", "vocab_size": 8, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 16, "rms_norm_eps": 1e-5, "tie_word_embeddings": false
}"#;

#[allow(dead_code, reason = "the test of this loop calls `train`")]
fn main() -> Result<()> {
    let backend = std::env::args().nth(1).unwrap_or("megatron".to_owned());
    for (step, reward) in train(&backend, 2, 60)?.iter().enumerate() {
        println!("step {step}: mean reward {reward:.3}");
    }
    Ok(())
}

/// Mean reward of each step.
pub(crate) fn train(backend: &str, ranks: usize, steps: u64) -> Result<Vec<f64>> {
    let backend = drivetrain::backend(backend)?;
    // With a Hugging Face folder: `ModelSpec::from_folder`, and `HfFolder::open` as the source of weights.
    let model = ModelSpec::from_hf_config(CONFIG, Path::new("config.json"))?;
    let mut config = JobConfig::new("in-code", backend.name(), steps, PROMPTS * ANSWERS);
    config.parallel.data_parallel_size = ranks;
    config.optimizer.learning_rate = 3e-3;
    config.objective = ObjectiveConfig {
        kind: ObjectiveKind::Grpo,
        ..ObjectiveConfig::default()
    };
    let objective = objective::from_config(&config.objective)?;
    let job = JobSpec { config, model };
    let weights = SeededWeights::new(&job.model, 1);

    let rewards = run_ranks(ranks, Duration::from_secs(60), |world| {
        let init = WeightInit::Source(&weights);
        let (mut engine, plan) = build_engine(&*backend, &job, world.clone(), init)?;
        let mut random = Random(7); // The same on every rank, so that all have the same answers.
        let mut rewards = Vec::new();
        for _ in 0..steps {
            let (mut global, reward) = rollouts(&mut engine, &mut random)?;

            // From here on, any RL loop. `prepare` makes advantages of rewards; `complete` adds the log-probs of
            // the policy as it is, where the batch does not bring the behaviour policy's.
            let mut totals = BatchTotals::count(&global);
            objective.prepare(&mut global, &mut totals)?;
            let cut = plan.cut(&global, MicrobatchLimit::Sequences(32))?;
            let mut share = cut.share(&global, plan.mesh.data_index(world.rank()))?;
            complete(&mut share, &mut engine, &objective)?;
            engine.forward_backward(&share, &objective, &totals)?;
            engine.optim_step(&StepOptions::default())?;
            rewards.push(reward);
        }
        Ok(rewards)
    })?;
    Ok(rewards.into_iter().next().unwrap_or_default())
}

/// Answers sampled from the policy, and their mean reward. A server of the exported weights would generate here; one
/// token can be sampled from the scores of all that it may be.
fn rollouts(engine: &mut dyn Engine, random: &mut Random) -> Result<(Batch, f64)> {
    let below = |random: &mut Random, n: u32| (random.uniform() * f64::from(n)) as u32;
    let draw = |_| [below(random, VOCAB), below(random, VOCAB)];
    let prompts: Vec<[u32; 2]> = (0..PROMPTS).map(draw).collect();
    let mut candidates = BatchBuilder::new();
    for [a, b] in &prompts {
        for answer in 0..VOCAB {
            candidates.push(&[*a, *b, answer], None)?;
        }
    }
    let scores = engine.forward(&candidates.build()?, &ScoreRequest::default())?;

    let (mut batch, mut rewards) = (BatchBuilder::new(), Vec::new());
    for (index, [a, b]) in prompts.iter().enumerate() {
        for _ in 0..ANSWERS {
            let mut rest = random.uniform();
            let log_prob = |answer| scores.log_probs[(index * VOCAB as usize + answer) * 3 + 2];
            let answer = (0..VOCAB - 1).find(|&answer| {
                rest -= log_prob(answer as usize).exp();
                rest < 0.0
            });
            let answer = answer.unwrap_or(VOCAB - 1);
            batch.push(&[*a, *b, answer], Some(&[false, false, true]))?;
            rewards.push(f64::from(u8::from(answer == *a)));
        }
    }
    let mean = rewards.iter().sum::<f64>() / rewards.len() as f64;
    batch.groups((0..=PROMPTS * ANSWERS).step_by(ANSWERS).collect());
    batch.column(REWARDS, Column::per_sequence(ColumnData::F64(rewards)));
    Ok((batch.build()?, mean))
}

/// SplitMix64 (Steele, Lea and Flood 2014).
struct Random(u64);

impl Random {
    /// From 0 to 1.
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

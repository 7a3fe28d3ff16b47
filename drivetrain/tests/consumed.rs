//! Which sequences a job trains on, each rank's own share looked at, over stops and resumes with other numbers of
//! ranks, other engines and other batch sizes: none twice in an epoch, none never (C13).

use std::{
    path::Path,
    sync::{Arc, Mutex, atomic::AtomicBool},
    time::Duration,
};

use drivetrain::{
    core::{
        Result,
        batch::{Batch, BatchTotals},
        checkpoint::{CheckpointStore, Identity},
        config::{JobConfig, JobSpec, Overlong},
        engine::{WeightInit, build_engine},
        launch::run_ranks,
        model::ModelSpec,
        objective::{Nll, Objective, ObjectiveValue, Requirements, TokenOutputs},
        trainer::{Outcome, Trainer},
        weights::SeededWeights,
    },
    data::{Dataset, DatasetOptions},
};
use tempfile::TempDir;

const SEQUENCES: u32 = 20;
const CONFIG: &str = r#"{
    "model_type": "llama", "vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 16
}"#;

/// The usual loss, which writes down the first token of each sequence that an engine computes for training.
#[derive(Debug)]
struct Seen<'a> {
    inner: Nll,
    first_tokens: &'a Mutex<Vec<u32>>,
}

impl Objective for Seen<'_> {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn requires(&self) -> Requirements {
        self.inner.requires()
    }

    fn evaluate(
        &self,
        microbatch: &Batch,
        outputs: &TokenOutputs,
        totals: &BatchTotals,
    ) -> Result<ObjectiveValue> {
        let firsts = (0..microbatch.num_sequences())
            .map(|s| microbatch.tokens()[microbatch.sequence(s).start]);
        self.first_tokens.lock().unwrap().extend(firsts);
        self.inner.evaluate(microbatch, outputs, totals)
    }
}

/// A part of a job's life.
#[derive(Debug, Clone, Copy)]
struct Part {
    backend: &'static str,
    ranks: usize,
    /// Steps until which it trains, from the newest checkpoint on.
    until: u64,
    batch: usize,
}

struct Desk {
    folder: TempDir,
    data: Arc<Dataset>,
    model: ModelSpec,
}

impl Desk {
    /// Twenty sequences of two to six tokens, each with a first token of its own.
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("data.jsonl");
        let lines: Vec<String> = (0..SEQUENCES)
            .map(|i| {
                let rest: Vec<u32> = (0..1 + i * 7 % 5).map(|t| (i + 3 * t) % 32).collect();
                let tokens = [&[i][..], &rest].concat();
                format!("{{\"tokens\": {tokens:?}}}")
            })
            .collect();
        std::fs::write(&file, lines.join("\n")).unwrap();
        let options = DatasetOptions {
            vocab_size: 32,
            max_length: 16,
            overlong: Overlong::Error,
            shuffle: true,
            tokenizer: folder.path().to_owned(),
            cache_bytes: 1 << 20,
        };
        Self {
            data: Arc::new(Dataset::open(&file, &options).unwrap()),
            model: ModelSpec::from_hf_config(CONFIG, Path::new("config.json")).unwrap(),
            folder,
        }
    }

    /// Trains a part, in micro-batches of one sequence; the first tokens that its ranks trained on, a list a step.
    fn train(&self, run: &str, part: Part, asynchronous: bool) -> Vec<Vec<u32>> {
        let backend = drivetrain::backend(part.backend).unwrap();
        let mut config = JobConfig::new("in-code", part.backend, part.until, part.batch);
        config.parallel.data_parallel_size = part.ranks;
        config.batch.micro_batch_size = Some(1);
        config.checkpoint.every = Some(1);
        config.checkpoint.asynchronous = asynchronous;
        let job = JobSpec {
            config,
            model: self.model.clone(),
        };
        let store = CheckpointStore::new(self.folder.path().join(run));
        let identity = Identity::new(&job.model, self.data.identity());
        let latest = store.latest().unwrap();
        let found = latest.map(|step| store.open_for(step, &identity).unwrap());
        let first_tokens = Mutex::default();
        let objective = Seen {
            inner: Nll::default(),
            first_tokens: &first_tokens,
        };
        let (weights, stop) = (SeededWeights::new(&job.model, 3), AtomicBool::new(false));
        let outcomes = run_ranks(part.ranks, Duration::from_secs(60), |world| {
            let init = match &found {
                Some(_) => WeightInit::Deferred,
                None => WeightInit::Source(&weights),
            };
            let (engine, plan) = build_engine(&*backend, &job, world.clone(), init)?;
            let data = Box::new(self.data.batches(part.batch, 3)?);
            let mut trainer = Trainer::new(&job, engine, &plan, &objective, data, world, &stop)?;
            trainer.checkpoints = Some((store.clone(), identity.clone()));
            if let Some(checkpoint) = &found {
                trainer.resume(checkpoint)?;
            }
            trainer.run(&mut ())
        });
        let end = Outcome::Finished { step: part.until };
        assert_eq!(outcomes.unwrap(), vec![end; part.ranks]);
        let seen = first_tokens.into_inner().unwrap();
        let steps = (part.until - latest.unwrap_or(0)) as usize;
        assert_eq!(seen.len(), steps * part.batch, "{part:?}");
        // A step ends, on every rank, before any rank begins the next.
        let steps = seen.chunks_exact(part.batch).map(<[u32]>::to_vec);
        steps
            .map(|mut step| {
                step.sort_unstable();
                step
            })
            .collect()
    }
}

fn engines() -> Vec<&'static str> {
    let names = [
        ("fsdp", cfg!(feature = "fsdp")),
        ("megatron", cfg!(feature = "megatron")),
    ];
    names
        .iter()
        .filter(|(_, built)| *built)
        .map(|(name, _)| *name)
        .collect()
}

#[test]
fn a_resumed_job_sees_what_an_uninterrupted_one_does() {
    let desk = Desk::new();
    let engines = engines();
    let (one, other) = (engines[0], *engines.last().unwrap());
    // Two epochs and a bit, of a batch that does not divide them.
    let whole = Part {
        backend: one,
        ranks: 1,
        until: 15,
        batch: 3,
    };
    let whole = desk.train("whole", whole, false);
    for asynchronous in [false, true] {
        let run = format!("parts-{asynchronous}");
        let parts = [
            (one, 3, 2),
            (other, 2, 5),
            (one, 1, 6),
            (other, 3, 11),
            (one, 2, 15),
        ];
        let seen: Vec<_> = parts
            .into_iter()
            .flat_map(|(backend, ranks, until)| {
                let part = Part {
                    backend,
                    ranks,
                    until,
                    batch: 3,
                };
                desk.train(&run, part, asynchronous)
            })
            .collect();
        assert_eq!(seen, whole);
    }
    let mut all = whole.concat();
    for _ in 0..2 {
        let mut epoch: Vec<u32> = all.drain(..SEQUENCES as usize).collect();
        epoch.sort_unstable();
        // The batch over the boundary is sorted as one, so that an epoch is known up to it.
        epoch.dedup();
        assert!(epoch.len() >= SEQUENCES as usize - 2, "{epoch:?}");
    }
}

/// The position counts what the epoch has given, so a resumed job may take more or less of it a step.
#[test]
fn another_batch_size_takes_up_where_the_first_left_off() {
    let desk = Desk::new();
    let backend = engines()[0];
    let parts = [(4, 4, 2), (2, 7, 1), (4, 9, 2)];
    let mut all: Vec<u32> = Vec::new();
    for (batch, until, ranks) in parts {
        all.extend(
            desk.train(
                "run",
                Part {
                    backend,
                    ranks,
                    until,
                    batch,
                },
                true,
            )
            .concat(),
        );
    }
    // 4 x 4, 3 x 2: 22 of which 20 are the first epoch; 2 x 4 more.
    assert_eq!(all.len(), 30);
    let position = |token: u32| all.iter().filter(|t| **t == token).count();
    let counts: Vec<usize> = (0..SEQUENCES).map(position).collect();
    // Every sequence of the first epoch, and half of the second.
    assert_eq!(counts.iter().filter(|n| **n == 1).count(), 10, "{counts:?}");
    assert_eq!(counts.iter().filter(|n| **n == 2).count(), 10, "{counts:?}");
}

//! Against the oracle on generated models and batches, drawn by proptest under the suite's seed.

use std::cell::RefCell;

use drivetrain_core::{
    Error, ErrorKind, Result, Severity,
    batch::Batch,
    engine::ScoreRequest,
    model::{Family, MlpSpec, ModelSpec, MoeSpec},
};
use proptest::{
    prelude::*,
    test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner},
};

use super::step::Setting;
use crate::{
    fixture::{batches, dense},
    objective::Polynomial,
    suite::{Case, Findings, Layout, Needs, Subject},
};

pub(super) fn cases() -> Vec<Case> {
    let of_family = |(name, family): (&str, Family)| {
        let needs = Needs::model(&with_family(&Shape::smallest(), family));
        Case::new(format!("generated/{name}"), needs, move |s, f| {
            generated(family, s, f)
        })
    };
    [
        ("llama", Family::Llama),
        ("mistral", Family::Mistral),
        ("qwen2", Family::Qwen2),
        ("qwen3", Family::Qwen3),
        ("mixtral", Family::Mixtral),
        ("qwen3_moe", Family::Qwen3Moe),
    ]
    .map(of_family)
    .into()
}

/// What is drawn.
#[derive(Debug, Clone)]
struct Shape {
    num_layers: usize,
    kv_heads: usize,
    queries_per_kv: usize,
    half_head: usize,
    hidden: usize,
    ffn: usize,
    vocab: usize,
    tied: bool,
    window: usize,
    /// Tokens and scored tokens of each sequence.
    sequences: Vec<(usize, usize)>,
    micro: usize,
    temperature: f64,
    seed: u64,
}

impl Shape {
    fn smallest() -> Self {
        Self {
            num_layers: 1,
            kv_heads: 1,
            queries_per_kv: 1,
            half_head: 1,
            hidden: 4,
            ffn: 3,
            vocab: 5,
            tied: false,
            window: 2,
            sequences: vec![(2, 1)],
            micro: 1,
            temperature: 1.0,
            seed: 0,
        }
    }

    fn batch(&self) -> Result<Batch> {
        let batch = batches::scored(&self.sequences, self.vocab, self.seed)?;
        batches::with_columns(batch, self.vocab, self.seed)
    }
}

fn shapes() -> impl Strategy<Value = Shape> {
    let model = (
        1usize..4,
        1usize..4,
        1usize..4,
        1usize..9,
        4usize..41,
        3usize..50,
        prop::sample::select(vec![5usize, 11, 53, 97, 101, 257]),
        any::<bool>(),
        1usize..12,
    );
    // No scored token, one, some, all that can be.
    let sequence = (1usize..41).prop_flat_map(|n| {
        let some = 0..n;
        let scored = prop_oneof![Just(0), Just(1.min(n - 1)), some, Just(n - 1)];
        (Just(n), scored)
    });
    let batch = (
        prop::collection::vec(sequence, 0..6),
        1usize..4,
        prop::sample::select(vec![1.0, 0.5, 1.7]),
        any::<u64>(),
    );
    (model, batch).prop_map(|(m, (sequences, micro, temperature, seed))| Shape {
        num_layers: m.0,
        kv_heads: m.1,
        queries_per_kv: m.2,
        half_head: m.3,
        hidden: m.4,
        ffn: m.5,
        vocab: m.6,
        tied: m.7,
        window: m.8,
        sequences,
        micro,
        temperature,
        seed,
    })
}

fn with_family(shape: &Shape, family: Family) -> ModelSpec {
    let mut model = dense(family, shape.num_layers);
    model.vocab_size = shape.vocab;
    model.hidden_size = shape.hidden;
    model.num_kv_heads = shape.kv_heads;
    model.num_heads = shape.kv_heads * shape.queries_per_kv;
    model.head_dim = 2 * shape.half_head;
    model.tied_embeddings = shape.tied;
    model.qkv_bias = family == Family::Qwen2;
    model.qk_norm = matches!(family, Family::Qwen3 | Family::Qwen3Moe);
    let sparse = matches!(family, Family::Mixtral | Family::Qwen3Moe);
    for (index, layer) in model.layers.iter_mut().enumerate() {
        layer.mlp = MlpSpec::Dense {
            ffn_size: shape.ffn,
        };
        if family == Family::Mistral {
            layer.sliding_window = Some(shape.window);
        }
        if sparse && (family == Family::Mixtral || index % 2 == 0) {
            layer.mlp = MlpSpec::Moe;
        }
    }
    if sparse {
        model.moe = Some(MoeSpec {
            num_experts: 5,
            experts_per_token: 2,
            ffn_size: shape.ffn,
            norm_topk_prob: family == Family::Mixtral || shape.micro == 1,
            aux_loss_coefficient: 0.0,
        });
    }
    model
}

fn generated(family: Family, subject: &Subject, findings: &mut Findings) -> Result<()> {
    let config = Config {
        cases: subject.settings.generated,
        failure_persistence: None,
        max_shrink_iters: 200,
        ..Config::default()
    };
    let mut seed = [0; 32];
    seed[..8].copy_from_slice(&subject.settings.seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &seed);
    let mut runner = TestRunner::new_with_rng(config, rng);
    let all = RefCell::new((std::mem::take(findings), 0u32));
    let outcome = runner.run(&shapes(), |shape| {
        let mut own = Findings::default();
        let ran = one(&shape, family, subject, &mut own);
        let verdict = ran.and_then(|ran| {
            if ran {
                own.verdict().map(|()| true)
            } else {
                Ok(false)
            }
        });
        match verdict {
            Ok(ran) => {
                let mut all = all.borrow_mut();
                all.0.extend(own);
                all.1 += u32::from(ran);
                Ok(())
            }
            Err(error) => Err(TestCaseError::fail(error.to_string())),
        }
    });
    let (compared, ran) = all.into_inner();
    *findings = compared;
    if let Err(error) = outcome {
        let message = match error {
            TestError::Fail(reason, shape) => {
                let smallest = with_family(&shape, family);
                format!("{reason}\nfor {shape:?}\nwhich is {smallest:?}")
            }
            TestError::Abort(reason) => reason.to_string(),
        };
        return Err(Error::new(ErrorKind::Parity, "conformance", message)
            .with("seed", subject.settings.seed));
    }
    let half = ran * 2 >= subject.settings.generated;
    findings.fact("at least half of the generated models are run", half);
    Ok(())
}

/// False if the backend's check refuses the model, or its router has drawn a choice too near to another.
fn one(shape: &Shape, family: Family, subject: &Subject, findings: &mut Findings) -> Result<bool> {
    let model = with_family(shape, family);
    let faults = subject.backend.check(&subject.job(&model));
    if faults.iter().any(|d| d.severity == Severity::Error) {
        return Ok(false);
    }
    let setting = Setting::new(&model, shape.seed)?;
    let batch = shape.batch()?;
    if !setting.is_far_from_ties(subject, &batch)? {
        return Ok(false);
    }
    let claims = subject.backend.capability();
    let request = ScoreRequest {
        temperature: shape.temperature,
        entropy: claims.entropy,
        ..ScoreRequest::default()
    };
    setting.check_scores(subject, findings, &batch, &request)?;
    let objective = Polynomial {
        temperature: shape.temperature,
        entropy: claims.entropy,
        at_ids: claims.log_probs_at,
    };
    let layout = Layout::default().sequences(shape.micro);
    setting.check_step(subject, findings, &batch, &objective, layout)?;
    Ok(true)
}

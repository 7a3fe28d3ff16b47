//! Against the oracle where sums are long: sequences beyond a block of attention, a vocabulary beyond a block of
//! the head. Kernels switch algorithms by size, so that small cases alone would leave the fast one unjudged.

use drivetrain_core::{
    Result,
    engine::ScoreRequest,
    model::{Family, ModelSpec},
    plan::MicrobatchLimit,
};

use super::step::Setting;
use crate::{
    fixture::{batches, dense},
    objective::Polynomial,
    suite::{Case, Findings, Layout, Needs, Subject},
};

/// Tokens and scored tokens: about a block of 64 and 128, more than one, and packed with short ones.
pub(super) const LONG: [(usize, usize); 6] =
    [(65, 40), (200, 199), (3, 2), (129, 1), (64, 63), (128, 0)];

/// Prime, and beyond 2^15: no block size divides it, no 16-bit index holds it.
const LARGE_VOCAB: usize = 50_021;

/// A name, a model, and its sequences as (tokens, of which scored).
type Fixture = (&'static str, ModelSpec, &'static [(usize, usize)]);

pub(super) fn cases() -> Vec<Case> {
    let long = |family, window: Option<usize>| {
        let mut model = dense(family, 2);
        model.max_position_embeddings = 256;
        model.qkv_bias = family == Family::Qwen2;
        model.qk_norm = family == Family::Qwen3;
        for layer in &mut model.layers {
            layer.sliding_window = window;
        }
        model
    };
    let mut wide_heads = long(Family::Llama, None);
    (wide_heads.num_heads, wide_heads.num_kv_heads) = (3, 1);
    wide_heads.head_dim = 64;
    let mut vocab = dense(Family::Llama, 1);
    vocab.vocab_size = LARGE_VOCAB;
    let mut tied_vocab = vocab.clone();
    tied_vocab.tied_embeddings = true;
    let all: [Fixture; 8] = [
        ("long/llama", long(Family::Llama, None), &LONG),
        ("long/wide_heads", wide_heads, &LONG),
        ("long/qwen2", long(Family::Qwen2, None), &LONG),
        ("long/qwen3", long(Family::Qwen3, None), &LONG),
        ("long/window_70", long(Family::Mistral, Some(70)), &LONG),
        ("long/window_5", long(Family::Mistral, Some(5)), &LONG),
        ("vocab/untied", vocab, &[(12, 9), (5, 4)]),
        ("vocab/tied", tied_vocab, &[(12, 9), (5, 4)]),
    ];
    all.into_iter()
        .flat_map(|(name, model, sequences)| of_model(name, &model, sequences))
        .collect()
}

fn of_model(name: &str, model: &ModelSpec, sequences: &'static [(usize, usize)]) -> Vec<Case> {
    let needs = Needs {
        entropy: true,
        ..Needs::model(model)
    };
    let scores = {
        let model = model.clone();
        move |subject: &Subject, findings: &mut Findings| -> Result<()> {
            let setting = Setting::new(&model, subject.settings.seed)?;
            let batch = batches::scored(sequences, model.vocab_size, subject.settings.seed)?;
            let request = ScoreRequest {
                temperature: 0.7,
                entropy: true,
                ..ScoreRequest::default()
            };
            setting.check_scores(subject, findings, &batch, &request)
        }
    };
    let step = |limit: MicrobatchLimit| {
        let model = model.clone();
        move |subject: &Subject, findings: &mut Findings| -> Result<()> {
            let (seed, vocab) = (subject.settings.seed, model.vocab_size);
            let setting = Setting::new(&model, seed)?;
            let batch = batches::scored(sequences, vocab, seed)?;
            let batch = batches::with_columns(batch, vocab, seed)?;
            let objective = Polynomial {
                temperature: 0.7,
                entropy: true,
                at_ids: false,
            };
            let layout = Layout::default().limit(limit);
            setting.check_step(subject, findings, &batch, &objective, layout)
        }
    };
    vec![
        Case::new(format!("large/{name}/scores"), needs.clone(), scores),
        Case::new(
            format!("large/{name}/step_packed"),
            needs.clone(),
            step(MicrobatchLimit::All),
        ),
        Case::new(
            format!("large/{name}/step_alone"),
            needs,
            step(MicrobatchLimit::Sequences(1)),
        ),
    ]
}

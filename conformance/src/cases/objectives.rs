//! Every built-in loss through the engine: on one rank, and cut over two.

use drivetrain_core::{
    Result,
    batch::{Batch, Column, ColumnData},
    config::{KlEstimator, ObjectiveConfig, ObjectiveKind},
    engine::ScoreRequest,
    objective::{self, ADVANTAGES, OLD_LOG_PROBS, REFERENCE_LOG_PROBS},
};

use super::step::{Setting, oracle};
use crate::{
    fixture::{Random, batches, model},
    suite::{Case, Findings, Layout, Needs, Subject},
};

const KINDS: [(&str, ObjectiveKind, Option<KlEstimator>); 7] = [
    ("nll", ObjectiveKind::Nll, None),
    ("ppo", ObjectiveKind::Ppo, Some(KlEstimator::K1)),
    ("grpo", ObjectiveKind::Grpo, Some(KlEstimator::K3)),
    ("dapo", ObjectiveKind::Dapo, Some(KlEstimator::K2)),
    ("gspo", ObjectiveKind::Gspo, Some(KlEstimator::K3)),
    ("cispo", ObjectiveKind::Cispo, Some(KlEstimator::K1)),
    ("dpo", ObjectiveKind::Dpo, None),
];

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for name in ["dense", "q3", "bias", "mixtral", "no_layers"] {
        for (kind_name, kind, kl) in KINDS {
            for (cut, layout) in [
                ("whole", Layout::default()),
                ("cut", Layout::data(2).sequences(2)),
            ] {
                for entropy in [false, true] {
                    // DPO has no entropy term.
                    if entropy && kind == ObjectiveKind::Dpo {
                        continue;
                    }
                    let config = ObjectiveConfig {
                        kind,
                        temperature: 0.8,
                        kl_coefficient: if kl.is_some() { 0.1 } else { 0.0 },
                        kl_estimator: kl,
                        entropy_coefficient: if entropy { 0.05 } else { 0.0 },
                        ..ObjectiveConfig::default()
                    };
                    let needs = Needs {
                        layout,
                        entropy,
                        ..Needs::model(&model(name))
                    };
                    let bonus = if entropy { "_entropy" } else { "" };
                    cases.push(Case::new(
                        format!("objectives/{name}/{kind_name}{bonus}_{cut}"),
                        needs,
                        move |s, f| one_step(name, &config, layout, s, f),
                    ));
                }
            }
        }
    }
    cases
}

fn one_step(
    name: &str,
    config: &ObjectiveConfig,
    layout: Layout,
    subject: &Subject,
    findings: &mut Findings,
) -> Result<()> {
    let model = model(name);
    let setting = Setting::new(&model, subject.settings.seed)?;
    let objective = objective::from_config(config)?;
    let batch = rollouts(&setting, config.temperature, subject)?;
    setting.check_step(subject, findings, &batch, &objective, layout)
}

/// Eight answers in pairs, with log-probs of an older and a reference policy that lie about the policy's own,
/// so that some ratios are clipped and some are not, and advantages of both signs.
fn rollouts(setting: &Setting<'_>, temperature: f64, subject: &Subject) -> Result<Batch> {
    let seed = subject.settings.seed;
    let shape = [
        (3, 2),
        (7, 4),
        (12, 9),
        (5, 1),
        (2, 1),
        (9, 3),
        (13, 12),
        (4, 1),
    ];
    let mut batch = batches::in_groups(&shape, 2, setting.model.vocab_size, seed)?;
    let request = ScoreRequest {
        temperature,
        ..ScoreRequest::default()
    };
    let scores = setting.score(&oracle(subject), &batch, &request)?;
    let mut random = Random::new(seed, "rollouts");
    for (name, spread) in [(OLD_LOG_PROBS, 0.3), (REFERENCE_LOG_PROBS, 0.5)] {
        let near = scores
            .log_probs
            .iter()
            .map(|l| l + spread * random.normal());
        let column = Column::per_token(ColumnData::F64(near.collect()));
        batch.set_column(name, column)?;
    }
    let advantages = (0..batch.num_sequences()).map(|_| random.normal());
    let advantages = Column::per_sequence(ColumnData::F64(advantages.collect()));
    batch.set_column(ADVANTAGES, advantages)?;
    Ok(batch)
}

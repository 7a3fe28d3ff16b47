//! One small example of each objective, by hand.

use super::*;

/// Sequences of 2 and of 1 scored tokens, a pair. Ratios to the old and to the reference policy: 1.1, 2 and 0.5.
fn example(extra: (&str, Column)) -> Case {
    let log_probs = [0.0, -1.0, -2.0, 0.0, -3.0];
    let ratios: [f64; 5] = [1.0, 1.1, 2.0, 1.0, 0.5];
    let old: Vec<f64> = log_probs
        .iter()
        .zip(ratios)
        .map(|(l, r)| l - r.ln())
        .collect();
    let mut builder = BatchBuilder::new();
    builder.push(&[1; 3], None).unwrap();
    builder.push(&[1; 2], None).unwrap();
    builder.groups(vec![0, 2]);
    builder.column(
        OLD_LOG_PROBS,
        Column::per_token(ColumnData::F64(old.clone())),
    );
    builder.column(REFERENCE_LOG_PROBS, Column::per_token(ColumnData::F64(old)));
    builder.column(extra.0, extra.1);
    Case {
        batch: builder.build().unwrap(),
        outputs: TokenOutputs {
            log_probs: log_probs.to_vec(),
            entropy: Some(vec![0.0, 1.0, 2.0, 0.0, 3.0]),
            ..TokenOutputs::default()
        },
    }
}

fn check(
    objective: impl Objective,
    case: &Case,
    loss: f64,
    d_log_probs: [f64; 3],
) -> ObjectiveValue {
    let value = case.evaluate(&objective).unwrap();
    let [a, b, c] = d_log_probs;
    let pairs = [value.loss]
        .into_iter()
        .chain(value.d_log_probs.iter().copied());
    let expected = [loss, 0.0, a, b, 0.0, c];
    assert_eq!(value.d_log_probs.len(), 5);
    for (found, expected) in pairs.zip(expected) {
        assert!(
            (found - expected).abs() <= 1e-12,
            "{value:?} for {expected}"
        );
    }
    value
}

fn advantages() -> (&'static str, Column) {
    (
        ADVANTAGES,
        Column::per_sequence(ColumnData::F32(vec![1.0, -1.0])),
    )
}

#[test]
fn nll() {
    let value = check(Nll::default(), &example(advantages()), 2.0, [-1.0 / 3.0; 3]);
    assert_eq!(value.metrics.value("log_prob"), Some(-2.0));
    let mean = Nll {
        terms: Terms::new(Aggregation::SequenceMean),
    };
    check(
        mean,
        &example(advantages()),
        (1.5 + 3.0) / 2.0,
        [-0.25, -0.25, -0.5],
    );
}

#[test]
fn ppo() {
    // The second token is clipped at 1.2, the third at 0.8.
    let loss = (-1.1 - 1.2 + 0.8) / 3.0;
    let value = check(
        ClippedSurrogate::ppo(),
        &example(advantages()),
        loss,
        [-1.1 / 3.0, 0.0, 0.0],
    );
    assert_eq!(value.metrics.value("ratio_max"), Some(2.0));
    let fraction = value.metrics.value("clip_fraction").unwrap();
    assert!((fraction - 2.0 / 3.0).abs() < 1e-15);
    assert!((value.metrics.value("ratio_mean").unwrap() - 1.2).abs() < 1e-15);
}

#[test]
fn ppo_with_dual_clip() {
    let ppo = ClippedSurrogate {
        dual_clip: Some(1.5),
        ..ClippedSurrogate::ppo()
    };
    let column = Column::per_sequence(ColumnData::F64(vec![-1.0, -1.0]));
    // The second token's ratio of 2 costs 1.5 at most.
    let loss = (1.1 + 1.5 + 0.8) / 3.0;
    check(
        ppo,
        &example((ADVANTAGES, column)),
        loss,
        [1.1 / 3.0, 0.0, 0.0],
    );
}

#[test]
fn grpo_from_rewards() {
    let rewards = Column::per_sequence(ColumnData::F32(vec![3.0, 1.0]));
    // Mean 2, sample deviation sqrt 2.
    let a = 1.0 / (2.0_f64.sqrt() + 1e-6);
    let loss = a * ((-1.1 - 1.2) / 2.0 + 0.8) / 2.0;
    check(
        ClippedSurrogate::grpo(),
        &example((REWARDS, rewards)),
        loss,
        [-1.1 * a / 4.0, 0.0, 0.0],
    );
}

#[test]
fn dapo() {
    let loss = (-1.1 - 1.28 + 0.8) / 3.0;
    check(
        ClippedSurrogate::dapo(),
        &example(advantages()),
        loss,
        [-1.1 / 3.0, 0.0, 0.0],
    );
}

#[test]
fn gspo() {
    let gspo = Gspo {
        clip: Clip {
            low: 0.2,
            high: 1.0,
        },
        ..Gspo::default()
    };
    // The ratios of the sequences: sqrt(1.1 * 2), and 0.5, clipped at 0.8.
    let s = 2.2_f64.sqrt();
    check(
        gspo,
        &example(advantages()),
        (-s + 0.8) / 2.0,
        [-s / 4.0, -s / 4.0, 0.0],
    );
}

#[test]
fn cispo() {
    let cispo = Cispo {
        clip: Clip {
            low: 1.0,
            high: 0.5,
        },
        ..Cispo::default()
    };
    // Weights 1.1, 1.5 (clipped) and 0.5: no token loses its gradient.
    let loss = (1.1 * 1.0 + 1.5 * 2.0 - 0.5 * 3.0) / 3.0;
    check(
        cispo,
        &example(advantages()),
        loss,
        [-1.1 / 3.0, -0.5, 0.5 / 3.0],
    );
}

#[test]
fn dpo() {
    let dpo = Dpo {
        beta: 0.5,
        ..Dpo::default()
    };
    // h = 0.5 * (ln(1.1 * 2) - ln 0.5) = ln sqrt 4.4.
    let odds = 4.4_f64.sqrt();
    let d = 0.5 / (1.0 + odds);
    let value = check(
        dpo,
        &example(advantages()),
        (1.0 / odds).ln_1p(),
        [-d, -d, d],
    );
    assert_eq!(value.metrics.value("reward_accuracy"), Some(1.0));
    let margin = value.metrics.value("reward_margin").unwrap();
    assert!((margin - odds.ln()).abs() < 1e-12);
}

#[test]
fn added_terms() {
    let nll = Nll {
        terms: Terms {
            entropy_coefficient: 0.5,
            kl: Some(KlTerm {
                coefficient: 0.1,
                estimator: KlEstimator::K2,
            }),
            ..Terms::new(Aggregation::TokenMean)
        },
    };
    let logs = [1.1_f64.ln(), 2.0_f64.ln(), 0.5_f64.ln()];
    let kl: f64 = logs.iter().map(|d| 0.5 * d * d).sum::<f64>() / 3.0;
    let loss = 2.0 + 0.1 * kl - 0.5 * 2.0;
    let value = check(
        nll,
        &example(advantages()),
        loss,
        logs.map(|d| (-1.0 + 0.1 * d) / 3.0),
    );
    assert_eq!(value.metrics.value("entropy"), Some(2.0));
    assert!((value.metrics.value("kl").unwrap() - kl).abs() < 1e-15);
    let d_entropy = value.d_entropy.unwrap();
    assert_eq!(d_entropy[0], 0.0);
    assert!((d_entropy[1] + 0.5 / 3.0).abs() < 1e-15);
}

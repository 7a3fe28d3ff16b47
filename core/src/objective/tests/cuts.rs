//! Loss and derivatives do not depend on how the global batch is cut, nor on what stands in masked slots.

use proptest::prelude::*;

use super::*;

fn assert_close(what: &str, found: f64, expected: f64) {
    let tolerance = 1e-12 * (1.0 + expected.abs());
    assert!(
        (found - expected).abs() <= tolerance,
        "{what}: {found} for {expected}"
    );
}

/// Evaluates micro-batch by micro-batch and puts the parts together.
fn evaluate_cut(case: &Case, objective: &dyn Objective, cuts: Vec<usize>) -> ObjectiveValue {
    let (batch, totals) = case.prepare(objective).unwrap();
    let batch = batch.with_microbatches(cuts).unwrap();
    let mut sum = ObjectiveValue::default();
    let mut at = 0;
    for index in 0..batch.num_microbatches() {
        let part = batch.microbatch(index);
        let tokens = at..at + part.num_tokens();
        at = tokens.end;
        let outputs = TokenOutputs {
            log_probs: case.outputs.log_probs[tokens.clone()].to_vec(),
            entropy: case.outputs.entropy.as_ref().map(|e| e[tokens].to_vec()),
            ..TokenOutputs::default()
        };
        let value = objective.evaluate(&part, &outputs, &totals).unwrap();
        sum.loss += value.loss;
        sum.d_log_probs.extend(value.d_log_probs);
        if let Some(d_entropy) = value.d_entropy {
            sum.d_entropy.get_or_insert_default().extend(d_entropy);
        }
        sum.metrics.merge(&value.metrics);
    }
    sum
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_cut_gives_the_same_sum(case in cases(), bits in any::<u8>()) {
        // A boundary may be cut twice: an empty micro-batch.
        let end = case.batch.num_sequences();
        let inner = case.batch.groups().iter().copied().filter(|g| bits >> (g / 2) & 1 == 1);
        let cuts: Vec<usize> = [0, 0].into_iter().chain(inner).chain([end, end]).collect();
        for objective in objectives() {
            let whole = case.evaluate(&objective).unwrap();
            let parts = evaluate_cut(&case, &objective, cuts.clone());
            let what = format!("{objective:?}");
            assert_close(&what, parts.loss, whole.loss);
            prop_assert_eq!(&parts.d_log_probs, &whole.d_log_probs, "{}", &what);
            prop_assert_eq!(&parts.d_entropy, &whole.d_entropy, "{}", &what);
            prop_assert_eq!(parts.metrics.iter().count(), whole.metrics.iter().count());
            for (name, metric) in whole.metrics.iter() {
                assert_close(name, parts.metrics.value(name).unwrap(), metric.value());
            }
        }
    }

    #[test]
    fn nan_in_masked_slots_is_nothing(case in cases()) {
        let scored = case.batch.scored();
        let poison = |values: &mut [f64]| {
            for (value, _) in values.iter_mut().zip(&scored).filter(|(_, scored)| !**scored) {
                *value = f64::NAN;
            }
        };
        let mut poisoned = case.clone();
        poison(&mut poisoned.outputs.log_probs);
        poison(poisoned.outputs.entropy.as_mut().unwrap());
        poisoned.edit(OLD_LOG_PROBS, poison);
        poisoned.edit(REFERENCE_LOG_PROBS, poison);
        poisoned.edit(ADVANTAGES, |advantages| {
            for (s, advantage) in advantages.iter_mut().enumerate() {
                if !scored[case.batch.sequence(s)].contains(&true) {
                    *advantage = f64::INFINITY;
                }
            }
        });
        for objective in objectives() {
            let (clean, found) = (case.evaluate(&objective).unwrap(), poisoned.evaluate(&objective).unwrap());
            prop_assert_eq!(clean, found, "{:?}", objective);
        }
    }
}

/// Sequences of 4 tokens with these masks and plain columns, in pairs.
fn fixture(masks: &[[bool; 4]]) -> Case {
    let mut builder = BatchBuilder::new();
    for mask in masks {
        builder.push(&[1; 4], Some(mask)).unwrap();
    }
    let num_tokens = 4 * masks.len();
    let numbers = |scale: f64| -> Vec<f64> {
        (0..num_tokens)
            .map(|t| -0.5 - scale * (t % 5) as f64)
            .collect()
    };
    builder.groups((0..masks.len()).step_by(2).chain([masks.len()]).collect());
    builder.column(
        OLD_LOG_PROBS,
        Column::per_token(ColumnData::F64(numbers(0.11))),
    );
    builder.column(
        REFERENCE_LOG_PROBS,
        Column::per_token(ColumnData::F64(numbers(0.12))),
    );
    builder.column(
        ADVANTAGES,
        Column::per_sequence(ColumnData::F64(vec![0.5; masks.len()])),
    );
    Case {
        batch: builder.build().unwrap(),
        outputs: TokenOutputs {
            log_probs: numbers(0.1),
            entropy: Some(vec![1.0; num_tokens]),
            ..TokenOutputs::default()
        },
    }
}

#[test]
fn a_masked_sequence_changes_no_gradient() {
    // Micro-batches of a sequence each; the last sequence is masked whole.
    let (some, none) = ([false, true, false, true], [false; 4]);
    let with = fixture(&[some, [true; 4], some, none]);
    for objective in objectives().iter().filter(|o| o.name() != "dpo") {
        let mut three = with.clone();
        three.batch = with.batch.select(&[0, 1, 2]);
        three.outputs.log_probs.truncate(12);
        three.outputs.entropy.as_mut().unwrap().truncate(12);
        let alone = three.evaluate(objective).unwrap();
        let mut singles = with.clone();
        singles.batch = with.batch.select(&[0, 1, 2, 3]);
        singles.batch = regrouped(&singles.batch);
        let found = evaluate_cut(&singles, objective, vec![0, 1, 2, 3, 4]);
        assert_close(objective.name(), found.loss, alone.loss);
        assert_eq!(found.d_log_probs[..12], alone.d_log_probs, "{objective:?}");
        assert_eq!(found.d_log_probs[12..], [0.0; 4], "{objective:?}");
    }
}

/// The same batch with a group a sequence.
fn regrouped(batch: &Batch) -> Batch {
    let mut builder = BatchBuilder::new();
    for s in 0..batch.num_sequences() {
        builder
            .push(&batch.tokens()[batch.sequence(s)], None)
            .unwrap();
    }
    for (name, column) in batch.columns() {
        builder.column(name, column.clone());
    }
    builder.build().unwrap()
}

#[test]
fn a_masked_sample_adds_nothing_to_the_divisor() {
    // 4 scored tokens and a masked sample: the mean is over 4, not over 5.
    let mut case = fixture(&[
        [false, true, true, true],
        [false; 4],
        [false, false, true, false],
    ]);
    case.outputs.log_probs.fill(-1.0);
    let value = case.evaluate(&Nll::default()).unwrap();
    assert_eq!((value.loss, value.d_log_probs[1]), (1.0, -0.25));
}

#[test]
fn nothing_scored_is_finite_everywhere() {
    let case = fixture(&[[false; 4], [true, false, false, false]]);
    for objective in objectives() {
        let value = case.evaluate(&objective).unwrap();
        assert_eq!(value.loss, 0.0, "{objective:?}");
        assert_eq!(value.d_log_probs, [0.0; 8], "{objective:?}");
        for (name, metric) in value.metrics.iter() {
            assert_eq!(metric.value(), 0.0, "{name}");
        }
    }
}

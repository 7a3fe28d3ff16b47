//! Bad input is an error that says where.

use proptest::{prelude::*, strategy::ValueTree, test_runner::TestRunner};

use super::*;
use crate::ErrorKind;

/// A generated case in which something is scored in both sequences of a pair, and where.
fn scored_case() -> (Case, usize) {
    let mut runner = TestRunner::deterministic();
    loop {
        let case = cases().new_tree(&mut runner).unwrap().current();
        let scored = case.batch.scored();
        let pair = case.batch.groups().windows(2).find(|group| {
            (group[0]..group[1]).all(|s| scored[case.batch.sequence(s)].contains(&true))
        });
        if let Some(pair) = pair {
            let range = case.batch.sequence(pair[1] - 1);
            let slot = range.clone().rfind(|&t| scored[t]).unwrap();
            return (case, slot);
        }
    }
}

/// The inputs that an objective reads a number a token from.
fn inputs(objective: &dyn Objective) -> Vec<String> {
    let requirements = objective.requires();
    let entropy = requirements.entropy.then(|| "entropy".to_owned());
    requirements
        .columns
        .into_iter()
        .filter(|name| name != ADVANTAGES)
        .chain(["log_probs".to_owned()])
        .chain(entropy)
        .collect()
}

#[test]
fn a_value_that_is_not_finite_is_named_with_its_place() {
    let (case, slot) = scored_case();
    let sequence = case
        .batch
        .starts()
        .iter()
        .rposition(|&s| s <= slot)
        .unwrap();
    let position = slot - case.batch.starts()[sequence];
    for objective in objectives() {
        for input in inputs(&objective) {
            for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                let mut case = case.clone();
                match input.as_str() {
                    "log_probs" => case.outputs.log_probs[slot] = bad,
                    "entropy" => case.outputs.entropy.as_mut().unwrap()[slot] = bad,
                    column => case.edit(column, |values| values[slot] = bad),
                }
                let error = case.evaluate(&objective).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::NonFinite, "{error}");
                assert_eq!(error.context("column"), Some(input.as_str()), "{error}");
                assert_eq!(
                    error.context("sequence"),
                    Some(sequence.to_string().as_str())
                );
                assert_eq!(
                    error.context("position"),
                    Some(position.to_string().as_str())
                );
            }
        }
    }
}

#[test]
fn a_loss_that_overflows_is_an_error() {
    let (mut case, slot) = scored_case();
    case.edit(OLD_LOG_PROBS, |old| old[slot] = -1e4);
    case.edit(ADVANTAGES, |advantages| advantages.fill(-1.0));
    let error = case.evaluate(&ClippedSurrogate::ppo()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NonFinite);
    assert_eq!(error.context("column"), Some("the loss"));
}

#[test]
fn a_missing_column_names_itself_and_the_objective() {
    let (case, _) = scored_case();
    for objective in objectives() {
        for missing in objective.requires().columns {
            let mut builder = BatchBuilder::new();
            for s in 0..case.batch.num_sequences() {
                let tokens = &case.batch.tokens()[case.batch.sequence(s)];
                builder.push(tokens, None).unwrap();
            }
            builder.groups(case.batch.groups().to_vec());
            for (name, column) in case.batch.columns().filter(|(name, _)| *name != missing) {
                builder.column(name, column.clone());
            }
            let case = Case {
                batch: builder.build().unwrap(),
                outputs: case.outputs.clone(),
            };
            let totals = BatchTotals::count(&case.batch);
            let evaluated = objective
                .evaluate(&case.batch, &case.outputs, &totals)
                .unwrap_err();
            let mut errors = vec![evaluated];
            // The engine may still compute log-probs after `prepare`, but nobody the advantages.
            match case.prepare(&objective) {
                Err(error) => errors.push(error),
                Ok(_) => assert_ne!(missing, ADVANTAGES),
            }
            for error in errors {
                assert_eq!(error.kind(), ErrorKind::Data, "{error}");
                assert_eq!(error.context("column"), Some(missing.as_str()));
                assert_eq!(error.context("objective"), Some(objective.name()));
            }
        }
    }
}

#[test]
fn totals_of_nothing_are_refused() {
    let (case, _) = scored_case();
    for objective in [
        BuiltinObjective::from(Nll::default()),
        Dpo::default().into(),
    ] {
        let error = objective
            .evaluate(&case.batch, &case.outputs, &BatchTotals::default())
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::CallOrder, "{error}");
    }
}

#[test]
fn dpo_refuses_groups_that_are_no_pairs() {
    let (mut case, _) = scored_case();
    case.batch = case.batch.select(&[0]);
    let error = case.prepare(&Dpo::default()).unwrap_err();
    assert_eq!(
        (error.kind(), error.context("found")),
        (ErrorKind::Data, Some("1"))
    );
}

#[test]
fn gspo_refuses_advantages_that_differ_within_a_sequence() {
    let mut builder = BatchBuilder::new();
    builder.push(&[1; 3], None).unwrap();
    for name in [OLD_LOG_PROBS, ADVANTAGES] {
        let column = Column::per_token(ColumnData::F64(vec![0.0, -1.0, -2.0]));
        builder.column(name, column);
    }
    let case = Case {
        batch: builder.build().unwrap(),
        outputs: TokenOutputs {
            log_probs: vec![0.0, -1.0, -2.0],
            ..TokenOutputs::default()
        },
    };
    let error = case.evaluate(&Gspo::default()).unwrap_err();
    assert_eq!(
        (error.kind(), error.context("column")),
        (ErrorKind::Data, Some(ADVANTAGES))
    );
}

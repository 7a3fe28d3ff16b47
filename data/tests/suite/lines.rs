//! What each kind of line means: rows D03, D04 and D05 of the known failures among them.

use drivetrain_core::{
    DType, ErrorKind,
    batch::{Batch, BatchTotals, ColumnScope},
    config::Overlong,
};
use drivetrain_data::DatasetOptions;
use serde_json::{Value, json};

use crate::desk::Desk;

fn read(lines: &[Value]) -> Batch {
    let desk = Desk::new();
    desk.open(lines, &desk.options())
        .unwrap()
        .all(None)
        .unwrap()
}

fn scored(batch: &Batch, sequence: usize) -> Vec<u32> {
    let scored = batch.scored();
    batch
        .sequence(sequence)
        .filter(|&t| scored[t])
        .map(|t| batch.tokens()[t])
        .collect()
}

#[test]
fn tokens_with_masks_and_labels() {
    let batch = read(&[
        json!({"tokens": [5, 6, 7]}),
        json!({"tokens": [5, 6, 7], "loss_mask": [0, 0, 1]}),
        json!({"tokens": [5, 6, 7], "loss_mask": [true, true, false]}),
        json!({"tokens": [5, 6, 7], "labels": [-100, 6, -100]}),
    ]);
    let found: Vec<_> = (0..4).map(|s| scored(&batch, s)).collect();
    assert_eq!(found, [vec![6, 7], vec![7], vec![6], vec![6]]);
}

/// D05: ids 97 and -1 and label -4 are errors for a vocabulary of 97; label -100 is not scored.
#[test]
fn ids_out_of_range_name_line_and_position() {
    let desk = Desk::new();
    let options = DatasetOptions {
        vocab_size: 97,
        ..desk.options()
    };
    let good = json!({"tokens": [1, 96], "labels": [-100, 96]});
    assert!(desk.open(std::slice::from_ref(&good), &options).is_ok());
    for (bad, field, position) in [
        (json!({"tokens": [1, 97]}), "tokens", "1"),
        (json!({"tokens": [-1, 5]}), "tokens", "0"),
        (json!({"tokens": [1, 4294967297u64]}), "tokens", "1"),
        (
            json!({"tokens": [1, 5, 6], "labels": [-100, 5, -4]}),
            "labels",
            "2",
        ),
        (
            json!({"tokens": [1, 5], "labels": [-100, 97]}),
            "labels",
            "1",
        ),
        (json!({"tokens": [1, 5], "labels": [1, 6]}), "labels", "1"),
        (
            json!({"tokens": [1, 2], "loss_mask": [1, 2]}),
            "loss_mask",
            "1",
        ),
        (
            json!({"prompt": [1], "completion": [2, 97]}),
            "completion",
            "1",
        ),
        (
            json!({"prompt": [1], "chosen": [2], "rejected": [97]}),
            "rejected",
            "0",
        ),
    ] {
        let error = desk
            .open(&[good.clone(), bad.clone()], &options)
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Data);
        let location = error.context("location").unwrap();
        assert!(location.ends_with("data.jsonl:2"), "{location}");
        assert_eq!(error.context("field"), Some(field), "{bad}");
        assert_eq!(error.context("position"), Some(position), "{bad}");
    }
}

/// D03: sequences without a scored token are accepted and weigh nothing.
#[test]
fn an_answer_without_tokens_weighs_nothing() {
    let batch = read(&[
        json!({"prompt": [3, 4, 5], "completion": []}),
        json!({"prompt": "cd", "completion": ""}),
        json!({"tokens": [3, 4], "loss_mask": [0, 0]}),
        json!({"tokens": [3]}),
        json!({"messages": [{"role": "user", "content": "a"}]}),
    ]);
    let totals = BatchTotals::count(&batch);
    assert_eq!(
        (batch.num_sequences(), totals.tokens, totals.sequences),
        (5, 0, 0)
    );
    // A prompt as long as the limit, its answer cut off.
    let desk = Desk::new();
    let options = DatasetOptions {
        max_length: 3,
        overlong: Overlong::Truncate,
        ..desk.options()
    };
    let dataset = desk
        .open(&[json!({"prompt": "cd", "completion": "e"})], &options)
        .unwrap();
    assert_eq!(dataset.truncated(), 1);
    let batch = dataset.all(None).unwrap();
    assert_eq!(
        (batch.num_tokens(), BatchTotals::count(&batch).tokens),
        (3, 0)
    );
}

/// D04: lengths at the limit and one above, under each policy.
#[test]
fn overlong_sequences_follow_the_policy() {
    let desk = Desk::new();
    let lines = [
        json!({"tokens": [3, 4, 5, 6], "advantages": [0, 1, 2, 3]}),
        json!({"tokens": [3, 4, 5, 6, 7], "advantages": [0, 1, 2, 3, 4]}),
    ];
    let options = |overlong| DatasetOptions {
        max_length: 4,
        overlong,
        ..desk.options()
    };
    let error = desk.open(&lines, &options(Overlong::Error)).unwrap_err();
    assert!(error.context("location").unwrap().ends_with(":2"));
    assert_eq!(error.context("found"), Some("5 tokens"));
    let skip = desk.open(&lines, &options(Overlong::Skip)).unwrap();
    assert_eq!((skip.len(), skip.skipped(), skip.truncated()), (1, 1, 0));
    let cut = desk.open(&lines, &options(Overlong::Truncate)).unwrap();
    assert_eq!((cut.len(), cut.skipped(), cut.truncated()), (2, 0, 1));
    let batch = cut.all(None).unwrap();
    assert_eq!(batch.lengths(), [4, 4]);
    let advantages = batch.column("advantages").unwrap();
    assert_eq!(advantages.to_f64(), [0., 1., 2., 3., 0., 1., 2., 3.]);
    let none = desk
        .open(&lines[1..], &options(Overlong::Skip))
        .unwrap_err();
    assert!(none.message().contains("over the limit"), "{none}");
}

#[test]
fn a_group_with_a_sequence_left_out_is_left_out_whole() {
    let desk = Desk::new();
    let options = DatasetOptions {
        max_length: 3,
        overlong: Overlong::Skip,
        ..desk.options()
    };
    let line = |length: usize, group: u32| json!({"tokens": vec![3; length], "group": group});
    let lines = [
        line(2, 0),
        line(3, 0),
        line(2, 1),
        line(4, 1),
        line(1, 1),
        line(1, 2),
    ];
    let dataset = desk.open(&lines, &options).unwrap();
    assert_eq!((dataset.len(), dataset.skipped()), (3, 3));
    let batch = dataset.all(None).unwrap();
    assert_eq!(
        (batch.lengths(), batch.groups()),
        (vec![2, 3, 1], &[0, 2, 3][..])
    );
    let pairs = [
        json!({"prompt": [3], "chosen": [4], "rejected": [4, 5, 6, 7]}),
        json!({"prompt": [3], "chosen": [4], "rejected": [5]}),
    ];
    let dataset = desk.open(&pairs, &options).unwrap();
    assert_eq!((dataset.len(), dataset.skipped()), (2, 2));
}

#[test]
fn pairs_are_groups_of_two_with_columns_of_their_own() {
    let batch = read(&[
        json!({"prompt": [3, 4], "chosen": [5], "rejected": [6, 7], "chosen_rewards": 1.5, "rejected_rewards": 0,
            "chosen_reference_log_probs": [null, null, -1], "rejected_reference_log_probs": [null, null, -2, -3]}),
        json!({"prompt": [3], "chosen": [5], "rejected": [6], "chosen_rewards": 1, "rejected_rewards": 0.5,
            "chosen_reference_log_probs": [0, -4], "rejected_reference_log_probs": [0, -5]}),
    ]);
    assert_eq!(batch.groups(), [0, 2, 4]);
    assert_eq!(batch.lengths(), [3, 4, 2, 2]);
    let found: Vec<_> = (0..4).map(|s| scored(&batch, s)).collect();
    assert_eq!(found, [vec![5], vec![6, 7], vec![5], vec![6]]);
    assert_eq!(
        batch.column("rewards").unwrap().to_f64(),
        [1.5, 0., 1., 0.5]
    );
    let reference = batch.column("reference_log_probs").unwrap().to_f64();
    let at_scored: Vec<_> = batch
        .scored()
        .iter()
        .zip(reference)
        .filter(|(s, _)| **s)
        .map(|(_, r)| r)
        .collect();
    assert_eq!(at_scored, [-1., -2., -3., -4., -5.]);
}

#[test]
fn groups_are_lines_in_a_row() {
    let member = |group: Value, id: u32| json!({"tokens": [3, id], "group": group, "rewards": id});
    let lines = [
        member(json!(7), 4),
        member(json!(7), 5),
        member(json!("7"), 6),
        member(json!("b"), 7),
    ];
    let batch = read(&lines);
    assert_eq!(batch.groups(), [0, 2, 3, 4]);
    assert_eq!(batch.column("rewards").unwrap().to_f64(), [4., 5., 6., 7.]);
    let desk = Desk::new();
    let error = desk.refused(&[lines[0].clone(), lines[2].clone(), lines[1].clone()]);
    assert!(error.message().contains("already over"), "{error}");
    assert!(
        error.context("expected").unwrap().ends_with("line 1"),
        "{error}"
    );
    let error = desk.refused(&[lines[0].clone(), json!({"tokens": [3], "rewards": 1})]);
    assert!(error.message().contains("some do not"), "{error}");
}

#[test]
fn fields_of_numbers_become_columns() {
    let batch = read(&[
        json!({"tokens": [3, 4], "old_log_probs": [null, -1.5], "rewards": 1, "routing": [[1, 2], [3, 4]], "w": 1}),
        json!({"text": "c", "old_log_probs": [0, 0, -2], "rewards": 0.5, "routing": [[5, 6], [7, 8], [9, 10]], "w": 2}),
    ]);
    let old = batch.column("old_log_probs").unwrap();
    assert_eq!((old.scope, old.dtype()), (ColumnScope::Token, DType::F64));
    assert_eq!(old.to_f64()[1..], [-1.5, 0., 0., -2.]);
    let rewards = batch.column("rewards").unwrap();
    assert_eq!(
        (rewards.scope, rewards.to_f64()),
        (ColumnScope::Sequence, vec![1., 0.5])
    );
    let routing = batch.column("routing").unwrap();
    assert_eq!(
        (&routing.trailing[..], routing.dtype()),
        (&[2][..], DType::I64)
    );
    assert_eq!(
        routing.to_f64(),
        (1..=10).map(f64::from).collect::<Vec<_>>()
    );
    assert_eq!(batch.column("w").unwrap().dtype(), DType::I64);
}

#[test]
fn blank_lines_line_ends_and_byte_order_marks_are_nothing() {
    let desk = Desk::new();
    desk.write(
        "data.jsonl",
        "\u{feff}{\"tokens\": [3, 4]}\r\n\r\n  \n{\"tokens\": [5]}",
    );
    let dataset =
        drivetrain_data::Dataset::open(&desk.path("data.jsonl"), &desk.options()).unwrap();
    assert_eq!(dataset.all(None).unwrap().tokens(), [3, 4, 5]);
}

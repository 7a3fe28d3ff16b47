//! The order of batches: every sample once an epoch, the same again from any position.

use std::sync::Arc;

use crate::desk::Desk;
use drivetrain_core::{ErrorKind, batch::Batch, trainer::BatchSource};
use drivetrain_data::{Dataset, DatasetOptions};
use proptest::prelude::*;
use serde_json::json;

fn numbered(desk: &Desk, count: u32) -> Arc<Dataset> {
    let lines: Vec<_> = (0..count)
        .map(|i| json!({"tokens": [3, 4], "id": i}))
        .collect();
    desk.open(&lines, &desk.options()).unwrap()
}

fn ids(batch: &Batch) -> Vec<u32> {
    batch
        .column("id")
        .unwrap()
        .to_f64()
        .into_iter()
        .map(|id| id as u32)
        .collect()
}

fn take(source: &mut dyn BatchSource, batches: usize) -> Vec<Vec<u32>> {
    (0..batches)
        .map(|_| ids(&source.next_batch().unwrap()))
        .collect()
}

#[test]
fn every_sample_once_an_epoch_in_a_new_order() {
    let desk = Desk::new();
    let dataset = numbered(&desk, 10);
    let all = take(&mut dataset.batches(4, 1).unwrap(), 5).concat();
    let (first, second) = all.split_at(10);
    for epoch in [first, second] {
        let mut sorted = epoch.to_vec();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..10).collect::<Vec<_>>());
    }
    assert_ne!(first, second);
    assert_ne!(take(&mut dataset.batches(4, 2).unwrap(), 5).concat(), all);
    // A batch larger than the data holds it several times.
    assert_eq!(take(&mut dataset.batches(20, 1).unwrap(), 1).concat(), all);
}

/// Data of which nothing is scored would train silently: every gradient is 0.
#[test]
fn data_without_a_scored_token_is_not_for_training() {
    let desk = Desk::new();
    let nothing = [
        json!({"tokens": [3], "loss_mask": [1]}),
        json!({"tokens": [3, 4], "loss_mask": [1, 0]}),
    ];
    let dataset = desk.open(&nothing, &desk.options()).unwrap();
    assert_eq!(dataset.all(None).unwrap().num_sequences(), 2);
    let error = dataset.batches(2, 1).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Data);
    assert_eq!(error.context("sequences"), Some("2"));
    let one = [&nothing[..], &[json!({"tokens": [3, 4]})]].concat();
    let dataset = desk.open(&one, &desk.options()).unwrap();
    assert!(dataset.batches(2, 1).is_ok());
}

#[test]
fn without_shuffling_the_file_is_the_order() {
    let desk = Desk::new();
    let options = DatasetOptions {
        shuffle: false,
        ..desk.options()
    };
    let lines: Vec<_> = (0..3).map(|i| json!({"tokens": [3, 4], "id": i})).collect();
    let dataset = desk.open(&lines, &options).unwrap();
    let batches = take(&mut dataset.batches(2, 1).unwrap(), 3);
    assert_eq!(batches, [[0, 1], [2, 0], [1, 2]]);
    let in_order: Vec<_> = dataset.in_order(2).map(|b| ids(&b.unwrap())).collect();
    assert_eq!(in_order, [vec![0, 1], vec![2]]);
    assert_eq!(ids(&dataset.all(Some(2)).unwrap()), [0, 1]);
}

#[test]
fn a_batch_takes_whole_groups_until_it_is_full() {
    let desk = Desk::new();
    let options = DatasetOptions {
        shuffle: false,
        ..desk.options()
    };
    let groups = [0, 0, 0, 1, 1, 2, 3];
    let lines: Vec<_> = (groups.iter().enumerate())
        .map(|(i, g)| json!({"tokens": [3, 4], "id": i, "group": g}))
        .collect();
    let dataset = desk.open(&lines, &options).unwrap();
    assert_eq!(dataset.len(), 7);
    let mut source = dataset.batches(4, 0).unwrap();
    let batches: Vec<_> = (0..3).map(|_| source.next_batch().unwrap()).collect();
    let found: Vec<_> = batches.iter().map(ids).collect();
    assert_eq!(
        found,
        [vec![0, 1, 2, 3, 4], vec![5, 6, 0, 1, 2], vec![3, 4, 5, 6]]
    );
    assert_eq!(batches[1].groups(), [0, 1, 2, 5]);
    assert_eq!(
        take(&mut dataset.batches(1, 0).unwrap(), 2),
        [vec![0, 1, 2], vec![3, 4]]
    );
    let sizes: Vec<_> = dataset
        .in_order(4)
        .map(|b| b.unwrap().num_sequences())
        .collect();
    assert_eq!(sizes, [5, 2]);
    let first = |most| dataset.all(Some(most)).unwrap().num_sequences();
    assert_eq!([1, 3, 4, 5, 6, 9].map(first), [3, 3, 3, 5, 6, 7]);
}

#[test]
fn groups_are_shuffled_whole() {
    let desk = Desk::new();
    let lines: Vec<_> = (0..40)
        .map(|i| json!({"tokens": [3, 4], "id": i, "group": i / 4}))
        .collect();
    let dataset = desk.open(&lines, &desk.options()).unwrap();
    let epoch = take(&mut dataset.batches(40, 3).unwrap(), 1).concat();
    let firsts: Vec<_> = epoch.chunks(4).map(|group| group[0]).collect();
    for (chunk, first) in epoch.chunks(4).zip(&firsts) {
        assert_eq!(chunk, [*first, first + 1, first + 2, first + 3]);
    }
    assert_ne!(firsts, (0..10).map(|g| 4 * g).collect::<Vec<_>>());
}

#[test]
fn a_position_is_held_against_data_and_seed() {
    let desk = Desk::new();
    let dataset = numbered(&desk, 10);
    let mut source = dataset.batches(4, 1).unwrap();
    take(&mut source, 3);
    let state = source.state();
    assert_eq!(
        (state["epoch"].as_u64(), state["index"].as_u64()),
        (Some(1), Some(2))
    );
    let other_seed = dataset.batches(4, 2).unwrap().restore(&state).unwrap_err();
    assert_eq!(other_seed.context("path"), Some("seed"));
    let more = numbered(&desk, 11);
    let other_data = more.batches(4, 1).unwrap().restore(&state).unwrap_err();
    assert_eq!(other_data.kind(), ErrorKind::Checkpoint);
    assert_eq!(other_data.context("found"), Some(&*more.identity()));
    let mut outside = state.clone();
    outside["index"] = json!(11);
    assert!(source.restore(&outside).is_err());
    assert!(source.restore(&json!({"epoch": 1})).is_err());
    assert_eq!(dataset.batches(0, 1).unwrap_err().kind(), ErrorKind::Config);
}

/// The batch size is no part of a position: a job may go on with another.
#[test]
fn a_job_resumes_with_another_batch_size() {
    let desk = Desk::new();
    let dataset = numbered(&desk, 10);
    let mut whole = dataset.batches(2, 1).unwrap();
    take(&mut whole, 3);
    let mut resumed = dataset.batches(4, 1).unwrap();
    resumed.restore(&whole.state()).unwrap();
    assert_eq!(take(&mut resumed, 1).concat(), take(&mut whole, 2).concat());
}

#[test]
fn the_identity_is_of_what_training_sees() {
    let desk = Desk::new();
    let lines = [json!({"tokens": [3, 4, 5]}), json!({"tokens": [6, 7]})];
    let identity =
        |lines: &[_], options: &DatasetOptions| desk.open(lines, options).unwrap().identity();
    let first = identity(&lines, &desk.options());
    assert_eq!(first.len(), 32);
    assert_eq!(identity(&lines, &desk.options()), first);
    // Limits that touch nothing, a cache, and fields written otherwise are the same training.
    let other = DatasetOptions {
        max_length: 50,
        cache_bytes: 0,
        ..desk.options()
    };
    assert_eq!(identity(&lines, &other), first);
    let masked = [
        json!({"loss_mask": [1, 1, 1], "tokens": [3, 4, 5]}),
        lines[1].clone(),
    ];
    assert_eq!(identity(&masked, &desk.options()), first);
    let unshuffled = DatasetOptions {
        shuffle: false,
        ..desk.options()
    };
    let cut = DatasetOptions {
        max_length: 2,
        overlong: drivetrain_core::config::Overlong::Truncate,
        ..desk.options()
    };
    let unscored = [
        json!({"loss_mask": [1, 0, 1], "tokens": [3, 4, 5]}),
        lines[1].clone(),
    ];
    let column = [3, 2].map(|n| json!({"tokens": vec![3; n], "rewards": n}));
    let grouped = [0, 0].map(|g| json!({"tokens": [3, 4], "group": g}));
    let apart = [0, 1].map(|g| json!({"tokens": [3, 4], "group": g}));
    let swapped = [lines[1].clone(), lines[0].clone()];
    let all = [
        first,
        identity(&lines, &unshuffled),
        identity(&lines, &cut),
        identity(&unscored, &desk.options()),
        identity(&column, &desk.options()),
        identity(&grouped, &desk.options()),
        identity(&apart, &desk.options()),
        identity(&swapped, &desk.options()),
    ];
    let distinct: std::collections::BTreeSet<_> = all.iter().collect();
    assert_eq!(distinct.len(), all.len());
}

#[test]
fn what_is_not_in_memory_is_read_again() {
    let desk = Desk::new();
    let lines: Vec<_> = (0..30)
        .map(|i| json!({"prompt": "ab", "completion": "c".repeat(i % 7 + 1), "rewards": i}))
        .collect();
    let cached = desk.open(&lines, &desk.options()).unwrap();
    let options = |cache_bytes| DatasetOptions {
        cache_bytes,
        ..desk.options()
    };
    for budget in [0, 1500] {
        let read = desk.open(&lines, &options(budget)).unwrap();
        let (mut a, mut b) = (cached.batches(7, 5).unwrap(), read.batches(7, 5).unwrap());
        for _ in 0..9 {
            assert_eq!(a.next_batch().unwrap(), b.next_batch().unwrap());
        }
    }
}

#[test]
fn a_file_that_changes_is_not_trained_on() {
    let desk = Desk::new();
    let options = DatasetOptions {
        cache_bytes: 0,
        ..desk.options()
    };
    let lines = [json!({"tokens": [3, 4]}), json!({"tokens": [5, 6]})];
    let dataset = desk.open(&lines, &options).unwrap();
    for text in [
        "{\"tokens\":[3,4]}\n{\"tokens\":[5,7]}\n",
        "{\"tokens\":[3,4]}\n",
    ] {
        desk.write("data.jsonl", text);
        let error = dataset.all(None).unwrap_err();
        assert!(error.message().contains("changed"), "{error}");
        assert!(
            error.context("location").unwrap().ends_with(":2"),
            "{error}"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn resuming_continues_exactly(
        count in 1u32..12,
        size in 1usize..7,
        seed in any::<u64>(),
        before in 0usize..6,
    ) {
        let desk = Desk::new();
        let dataset = numbered(&desk, count);
        let mut whole = dataset.batches(size, seed).unwrap();
        take(&mut whole, before);
        let mut resumed = dataset.batches(size, seed).unwrap();
        resumed.restore(&whole.state()).unwrap();
        prop_assert_eq!(take(&mut resumed, 6), take(&mut whole, 6));
    }
}

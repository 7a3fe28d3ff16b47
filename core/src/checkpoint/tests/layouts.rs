//! Any layout in, any layout out.

use serde_json::json;

use super::*;
use crate::{DType, ErrorKind, checkpoint::StateReader};

#[test]
fn twelve_ranks_are_merged_in_order_and_any_run_is_read() {
    // C05: 10 sorts before 2 as text.
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointStore::new(folder.path());
    save(&store, 3, &rows(12)).unwrap();
    let found = store.open_for(3, &identity()).unwrap();
    assert_eq!((found.step(), found.world_size()), (3, 12));
    assert_eq!(found.identity().backend, "test");
    assert_eq!(found.shape("w", StateSlot::Weight), Some(vec![97, 3]));
    assert_eq!(found.shape("w", StateSlot::ExpAvg), None);
    assert_eq!(found.blob("step"), Some(&json!(3)));
    let all: Vec<f32> = (0..291).map(value).collect();
    let read = |runs: &[_]| found.read("w", StateSlot::Weight, runs).unwrap();
    assert_eq!(bits(&read(&[0..291])), bits(&all));
    // The second of every three: a split of the last dim.
    let columns: Vec<_> = (0..97).map(|row| row * 3 + 1..row * 3 + 2).collect();
    let expected: Vec<f32> = (0..97).map(|row| value(row * 3 + 1)).collect();
    assert_eq!(bits(&read(&columns)), bits(&expected));
    // Not in order, overlapping, empty: as asked.
    let expected = [&all[200..250], &all[0..40], &all[30..60]].concat();
    assert_eq!(
        bits(&read(&[200..250, 7..7, 0..40, 30..60])),
        bits(&expected)
    );
    let error = found.read("w", StateSlot::Weight, &[280..292]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Checkpoint);
    let error = found.read("v", StateSlot::Weight, &[0..1]).unwrap_err();
    assert_eq!(
        (error.kind(), error.context("tensor")),
        (ErrorKind::Checkpoint, Some("v"))
    );
    found.verify().unwrap();
}

#[test]
fn column_splits_and_ranks_with_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointStore::new(folder.path());
    let column = |a: usize, b: usize| {
        (0..97)
            .map(|row| row * 3 + a..row * 3 + b)
            .collect::<Vec<_>>()
    };
    save(&store, 1, &[column(0, 1), vec![], column(1, 3)]).unwrap();
    let found = store.open(1).unwrap();
    let all: Vec<f32> = (0..291).map(value).collect();
    let read = found
        .read("w", StateSlot::Weight, &[0..100, 100..291])
        .unwrap();
    assert_eq!(bits(&read), bits(&all));
}

#[test]
fn f64_is_kept_and_rounded_only_when_asked() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointStore::new(folder.path());
    let values = [0.1f64, f64::MIN_POSITIVE, -3.0];
    run_ranks(1, TIMEOUT, |comm| {
        let mut writer = store.writer(0, &comm, &identity())?;
        writer.piece(StatePiece {
            name: "m",
            slot: StateSlot::ExpAvg,
            shape: &[3],
            runs: vec![0..3],
            data: values.as_slice().into(),
        })?;
        writer.finish()?.finish()
    })
    .unwrap();
    let found = store.open(0).unwrap();
    assert_eq!(found.dtype("m", StateSlot::ExpAvg), Some(DType::F64));
    assert_eq!(
        found.read_f64("m", StateSlot::ExpAvg, &[0..3]).unwrap(),
        values
    );
    assert_eq!(
        found.read("m", StateSlot::ExpAvg, &[0..3]).unwrap(),
        [0.1f32, 0.0, -3.0]
    );
    assert_eq!(
        found.tensors().collect::<Vec<_>>(),
        [("m", StateSlot::ExpAvg)]
    );
}

#[test]
fn several_pieces_of_one_tensor_from_one_rank() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointStore::new(folder.path());
    run_ranks(1, TIMEOUT, |comm| {
        let mut writer = store.writer(0, &comm, &identity())?;
        for start in [2, 0, 1] {
            let data = [start as f32];
            writer.piece(StatePiece {
                name: "w",
                slot: StateSlot::Weight,
                shape: &[3],
                runs: vec![start..start + 1],
                data: data.as_slice().into(),
            })?;
        }
        writer.finish()?.finish()
    })
    .unwrap();
    let read = store
        .open(0)
        .unwrap()
        .read("w", StateSlot::Weight, &[0..3])
        .unwrap();
    assert_eq!(read, [0.0, 1.0, 2.0]);
}

#[test]
fn pieces_that_overlap_or_leave_a_gap_are_never_written() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointStore::new(folder.path());
    for (runs, message) in [
        ([vec![0..150], vec![149..291]], "overlap"),
        ([vec![0..150], vec![151..291]], "missing"),
        ([vec![0..291], vec![0..291]], "overlap"),
        ([vec![1..150], vec![150..291]], "missing"),
        ([vec![0..150], vec![150..290]], "missing"),
    ] {
        let error = save(&store, 1, &runs).unwrap_err();
        assert!(error.to_string().contains(message), "{runs:?}: {error}");
        assert!(entries(folder.path()).is_empty());
    }
}

#[test]
fn a_piece_that_contradicts_itself_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointStore::new(folder.path());
    for runs in [
        vec![0..2],
        vec![2..3, 0..2],
        vec![0..2, 1..2],
        vec![290..293],
    ] {
        let error = run_ranks(1, TIMEOUT, |comm| {
            let mut writer = store.writer(0, &comm, &identity())?;
            writer.piece(StatePiece {
                name: "w",
                slot: StateSlot::Weight,
                shape: &[97, 3],
                runs: runs.clone(),
                data: [1.0f32, 2.0, 3.0].as_slice().into(),
            })
        })
        .unwrap_err();
        assert_eq!(error.context("tensor"), Some("w"), "{runs:?}");
        assert!(entries(folder.path()).is_empty());
    }
}

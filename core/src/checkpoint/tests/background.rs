//! Saves that go on beside the training.

use std::fs;

use super::*;
use crate::{ErrorKind, View, checkpoint::SaveHandle, communicator::ReduceOp};

/// What a rank has to do after it gave its rows of `[97, 3]`, whose memory is then overwritten.
fn begin(store: &CheckpointStore, step: u64, comm: &Arc<dyn Communicator>) -> Result<SaveHandle> {
    let mut writer = store.background_writer(step, comm, &identity())?;
    let runs = rows(comm.world_size())[comm.rank()].clone();
    let mut data: Vec<f32> = runs.iter().cloned().flatten().map(value).collect();
    writer.piece(StatePiece {
        name: "w",
        slot: StateSlot::Weight,
        shape: &[97, 3],
        runs,
        data: View::F32(&data),
    })?;
    data.fill(f32::NAN);
    writer.blob("step", json!(step))?;
    writer.finish()
}

/// What a step of training does on the same communicator.
fn train(comm: &Arc<dyn Communicator>) -> Result<()> {
    let mut sum = [1.0f64];
    comm.all_reduce((&mut sum[..]).into(), ReduceOp::Sum)?
        .wait()?;
    assert_eq!(sum[0], comm.world_size() as f64);
    Ok(())
}

#[test]
fn training_goes_on_and_the_checkpoint_is_of_the_step_it_was_taken_at() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointStore::new(folder.path());
    let stages = run_ranks(3, TIMEOUT, |comm| {
        let mut save = begin(&store, 4, &comm)?;
        let mut stages = 0;
        while !save.is_done() {
            train(&comm)?;
            // Nothing appears before every rank has said that it is done.
            if stages == 0 && comm.rank() == 0 {
                assert_eq!(entries(store.root()), [".step-00000004.tmp"]);
            }
            train(&comm)?;
            save = save.advance()?;
            stages += 1;
        }
        assert!(save.is_ready());
        assert_eq!(store.latest()?, Some(4));
        Ok(stages)
    })
    .unwrap();
    assert_eq!(stages, [2; 3]);
    let found = store.open(4).unwrap();
    found.verify().unwrap();
    let all: Vec<f32> = (0..291).map(value).collect();
    let read = crate::checkpoint::StateReader::read(&found, "w", StateSlot::Weight, &[0..291]);
    assert_eq!(bits(&read.unwrap()), bits(&all));
    // The same bytes as those of a save that training waited for.
    save(&store, 5, &rows(3)).unwrap();
    for rank in 0..3 {
        let file = |step: u64| {
            fs::read(
                folder
                    .path()
                    .join(format!("step-{step:08}/rank-{rank:05}.safetensors")),
            )
        };
        assert_eq!(file(4).unwrap(), file(5).unwrap());
    }
}

#[test]
fn a_stage_is_ready_by_itself() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointStore::new(folder.path());
    run_ranks(1, TIMEOUT, |comm| {
        let mut save = begin(&store, 1, &comm)?;
        while !save.is_done() {
            let began = std::time::Instant::now();
            while !save.is_ready() {
                assert!(began.elapsed() < TIMEOUT);
                std::thread::yield_now();
            }
            save = save.advance()?;
        }
        Ok(())
    })
    .unwrap();
    assert_eq!(store.list().unwrap(), [1]);
}

#[test]
fn a_save_that_is_given_up_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointStore::new(folder.path());
    save(&store, 1, &rows(2)).unwrap();
    run_ranks(2, TIMEOUT, |comm| begin(&store, 2, &comm).map(drop)).unwrap();
    run_ranks(2, TIMEOUT, |comm| {
        begin(&store, 3, &comm)?.advance().map(drop)
    })
    .unwrap();
    // The second had come to its commit, which is finished or not, but never half.
    let left = store.scan().unwrap();
    assert!(left.incomplete.is_empty() && left.complete.contains_key(&1));
    assert!(
        entries(folder.path())
            .iter()
            .all(|name| name.starts_with("step-"))
    );
}

#[test]
fn a_failure_beside_the_training_is_every_ranks_and_names_the_path() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointStore::new(folder.path());
    save(&store, 1, &rows(2)).unwrap();
    let errors = run_ranks(2, TIMEOUT, |comm| {
        let save = begin(&store, 2, &comm)?;
        comm.barrier()?;
        if comm.rank() == 0 {
            fs::remove_dir_all(folder.path().join(".step-00000002.tmp")).unwrap();
        }
        comm.barrier()?;
        let error = save.finish().unwrap_err();
        // The ranks are in step: they can go on, and save again.
        train(&comm)?;
        begin(&store, 3, &comm)?.finish()?;
        Ok((error.kind(), error.to_string()))
    })
    .unwrap();
    for (kind, text) in errors {
        assert_eq!(kind, ErrorKind::File);
        assert!(text.contains(".step-00000002.tmp"), "{text}");
    }
    assert_eq!(store.list().unwrap(), [1, 3]);
}

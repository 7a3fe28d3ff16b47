//! What appears, what stays, and what is refused.

use std::fs;

use super::*;
use crate::{Error, ErrorKind};

#[test]
fn latest_follows_from_the_names() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointStore::new(folder.path().join("not/yet"));
    assert_eq!(store.latest().unwrap(), None);
    for step in [9, 100, 20] {
        save(&store, step, &rows(1)).unwrap();
    }
    assert_eq!(store.list().unwrap(), [9, 20, 100]);
    assert_eq!(store.latest().unwrap(), Some(100));
    assert_eq!(
        entries(store.root()),
        ["step-00000009", "step-00000020", "step-00000100"]
    );
    assert_eq!(
        entries(&store.root().join("step-00000009")),
        ["manifest.json", "rank-00000.safetensors"]
    );
    let error = store.open(10).unwrap_err();
    assert_eq!(error.context("found"), Some("steps [9, 20, 100]"));
    fs::create_dir_all(store.root().join(".step-00000007.tmp/left by a kill")).unwrap();
    assert_eq!(store.prune(2).unwrap(), [9]);
    assert_eq!(entries(store.root()), ["step-00000020", "step-00000100"]);
    assert_eq!(store.prune(0).unwrap(), [20]);
    assert_eq!(entries(store.root()), ["step-00000100"]);
    fs::create_dir(store.root().join("step-00000101")).unwrap();
    fs::create_dir(store.root().join("notes")).unwrap();
    assert!(!store.is_empty().unwrap());
    store.clear().unwrap();
    assert!(store.is_empty().unwrap());
    assert_eq!(entries(store.root()), ["notes"]);
}

#[test]
fn what_is_incomplete_is_ignored_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointStore::new(folder.path());
    for step in 1..=5 {
        save(&store, step, &rows(2)).unwrap();
    }
    let at = |step: u64, name: &str| folder.path().join(format!("step-{step:08}")).join(name);
    fs::remove_file(at(2, "manifest.json")).unwrap();
    fs::remove_file(at(3, "rank-00001.safetensors")).unwrap();
    let manifest = fs::read(at(4, "manifest.json")).unwrap();
    fs::write(at(4, "manifest.json"), &manifest[..manifest.len() / 2]).unwrap();
    let data = fs::read(at(5, "rank-00000.safetensors")).unwrap();
    fs::write(at(5, "rank-00000.safetensors"), &data[..data.len() - 1]).unwrap();
    fs::create_dir(folder.path().join(".step-00000007.tmp")).unwrap();
    fs::create_dir(folder.path().join("step-x")).unwrap();
    let scan = store.scan().unwrap();
    assert_eq!(scan.complete.into_keys().collect::<Vec<_>>(), [1]);
    let named: Vec<_> = (scan.incomplete.iter())
        .map(|(path, error)| {
            assert!(error.context("file").is_some(), "{error}");
            path.file_name().unwrap().to_str().unwrap().to_owned()
        })
        .collect();
    assert_eq!(
        named,
        [
            "step-00000002",
            "step-00000003",
            "step-00000004",
            "step-00000005"
        ]
    );
    assert_eq!(store.latest().unwrap(), Some(1));
}

#[test]
fn a_kill_at_any_moment_leaves_the_last_complete_one() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointStore::new(folder.path());
    save(&store, 1, &rows(1)).unwrap();
    // Killed while writing: forgetting the writer leaves what a kill leaves.
    run_ranks(1, TIMEOUT, |comm| {
        let writer = store.writer(2, &comm, &identity())?;
        std::mem::forget(writer);
        Ok(())
    })
    .unwrap();
    assert_eq!(
        entries(folder.path()),
        [".step-00000002.tmp", "step-00000001"]
    );
    assert_eq!(store.latest().unwrap(), Some(1));
    // Killed between the two renames of a replacement.
    let old = folder.path().join(".step-00000001.old");
    fs::rename(folder.path().join("step-00000001"), &old).unwrap();
    assert_eq!(store.latest().unwrap(), Some(1));
    store.open(1).unwrap().verify().unwrap();
    // The next save clears both.
    save(&store, 2, &rows(2)).unwrap();
    save(&store, 1, &rows(2)).unwrap();
    assert_eq!(entries(folder.path()), ["step-00000001", "step-00000002"]);
    assert_eq!(store.open(1).unwrap().world_size(), 2);
}

#[test]
fn a_dropped_writer_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointStore::new(folder.path());
    run_ranks(2, TIMEOUT, |comm| {
        store.writer(2, &comm, &identity()).map(drop)
    })
    .unwrap();
    assert!(entries(folder.path()).is_empty());
}

#[test]
fn one_rank_that_fails_fails_all_and_nothing_appears() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointStore::new(folder.path());
    save(&store, 1, &rows(4)).unwrap();
    let outcomes = run_ranks(4, TIMEOUT, |comm| {
        let mut writer = store.writer(2, &comm, &identity())?;
        if comm.rank() == 2 {
            // Its data never comes.
            writer.blob("x", json!(1))?;
        } else {
            let range = rows(4)[comm.rank()][0].clone();
            let data: Vec<f32> = range.clone().map(value).collect();
            writer.piece(StatePiece {
                name: "w",
                slot: StateSlot::Weight,
                shape: &[97, 3],
                runs: vec![range],
                data: (&data).into(),
            })?;
        }
        Ok::<_, Error>(writer.finish()?.finish().unwrap_err().to_string())
    })
    .unwrap();
    assert!(
        outcomes[0].contains("elements of a tensor are missing"),
        "{}",
        outcomes[0]
    );
    for text in &outcomes[1..] {
        assert!(
            text.contains("rank 0 failed") && text.contains("missing"),
            "{text}"
        );
    }
    assert_eq!(entries(folder.path()), ["step-00000001"]);
}

#[test]
fn another_model_is_refused_before_any_write() {
    // C14
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointStore::new(folder.path());
    save(&store, 1, &rows(1)).unwrap();
    let other = Identity::new(&model(16), "data");
    let error = run_ranks(2, TIMEOUT, |comm| store.writer(2, &comm, &other).map(drop)).unwrap_err();
    assert!(error.to_string().contains("another model"), "{error}");
    assert_eq!(entries(folder.path()), ["step-00000001"]);
    let error = store.open_for(1, &other).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Checkpoint);
    assert!(
        error
            .context("expected")
            .unwrap()
            .contains("hidden size 16"),
        "{error}"
    );
    let error = store
        .open_for(1, &Identity::new(&model(8), "other data"))
        .unwrap_err();
    assert_eq!(
        (error.kind(), error.context("found")),
        (ErrorKind::Checkpoint, Some("data"))
    );
    store.open(1).unwrap();
    // Another backend is no other job, another dtype no other model.
    let mut stored = model(8);
    stored.dtype = crate::DType::Bf16;
    stored.config.insert("use_cache".into(), json!(false));
    store
        .open_for(1, &Identity::new(&stored, "data").written_by("another"))
        .unwrap();
    let mut wider = model(8);
    wider.rope.theta = 5e5;
    assert_ne!(wider.fingerprint(), model(8).fingerprint());
}

#[test]
fn a_place_that_cannot_be_written_is_named_on_every_rank() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let store = CheckpointStore::new(file.join("below"));
    let texts = run_ranks(3, TIMEOUT, |comm| {
        Ok::<_, Error>(store.writer(1, &comm, &identity()).unwrap_err().to_string())
    })
    .unwrap();
    for text in texts {
        assert!(text.contains("file/below"), "{text}");
    }
}

/// R03: not a hang, and not at the timeout.
#[test]
fn a_save_that_only_one_rank_calls_is_an_error_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointStore::new(folder.path());
    let began = std::time::Instant::now();
    let error = run_ranks(4, TIMEOUT, |comm| match comm.rank() {
        0 => store.writer(1, &comm, &identity()).map(drop),
        _ => Ok(()),
    })
    .unwrap_err();
    assert!(began.elapsed() < TIMEOUT / 4, "{:?}", began.elapsed());
    assert_eq!(error.kind(), ErrorKind::RankLost);
    assert!(entries(folder.path()).is_empty());
}

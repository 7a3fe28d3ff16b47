//! C07: damage is found and named.

use std::{fs, os::unix::fs::FileExt};

use super::*;
use crate::{ErrorKind, checkpoint::StateReader};

#[test]
fn a_flipped_bit_in_the_data_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointStore::new(folder.path());
    save(&store, 1, &rows(2)).unwrap();
    let path = folder.path().join("step-00000001/rank-00001.safetensors");
    let len = fs::metadata(&path).unwrap().len();
    let file = fs::File::options()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, len - 3).unwrap();
    file.write_all_at(&[byte[0] ^ 4], len - 3).unwrap();
    let found = store.open(1).unwrap();
    // The other rank's rows are fine.
    found.read("w", StateSlot::Weight, &[0..100]).unwrap();
    for error in [
        found.read("w", StateSlot::Weight, &[200..201]).unwrap_err(),
        found
            .read_f64("w", StateSlot::Weight, &[200..201])
            .unwrap_err(),
        found.verify().unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::File);
        assert!(error.message().contains("checksum"), "{error}");
        assert_eq!(error.context("file"), path.to_str());
    }
}

#[test]
fn every_change_to_the_manifest_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let store = CheckpointStore::new(folder.path());
    save(&store, 1, &rows(2)).unwrap();
    let path = folder.path().join("step-00000001/manifest.json");
    let good = fs::read(&path).unwrap();
    for position in 0..good.len() {
        let mut bad = good.clone();
        bad[position] ^= 1;
        fs::write(&path, &bad).unwrap();
        assert!(store.open(1).is_err(), "byte {position} of {}", good.len());
    }
    fs::write(&path, &good).unwrap();
    store.open(1).unwrap().verify().unwrap();
    let newer = String::from_utf8(good)
        .unwrap()
        .replace("\"version\":1", "\"version\":2");
    fs::write(&path, newer).unwrap();
    let (_, error) = store.scan().unwrap().incomplete.remove(0);
    assert_eq!(error.kind(), ErrorKind::Checkpoint);
    assert!(
        error.context("found").unwrap().contains("version 2"),
        "{error}"
    );
}

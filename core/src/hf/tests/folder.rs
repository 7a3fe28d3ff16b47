use std::{fs, path::Path};

use safetensors::Dtype;
use serde_json::json;

use super::{Tensor, config, model, tensors, value, write};
use crate::{DType, Error, ErrorKind, hf::HfFolder, model::ModelSpec, weights::WeightSource};

fn open(folder: &Path, model: &ModelSpec) -> Error {
    HfFolder::open(folder, model).unwrap_err()
}

/// Two shards and their index.
fn write_shards(folder: &Path, tensors: &[Tensor], cut: usize) {
    let names = [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ];
    let (a, b) = tensors.split_at(cut);
    write(&folder.join(names[0]), a);
    write(&folder.join(names[1]), b);
    let map: serde_json::Map<_, _> = (tensors.iter().enumerate())
        .map(|(i, t)| (t.0.clone(), json!(names[usize::from(i >= cut)])))
        .collect();
    let index = json!({"metadata": {"total_size": 0}, "weight_map": map});
    fs::write(
        folder.join("model.safetensors.index.json"),
        index.to_string(),
    )
    .unwrap();
}

#[test]
fn every_float_dtype_is_read_exactly() {
    let model = model(&config());
    let parameters = model.parameters();
    for (stored, dtype) in [
        (Dtype::F64, DType::F64),
        (Dtype::F32, DType::F32),
        (Dtype::BF16, DType::Bf16),
        (Dtype::F16, DType::F16),
    ] {
        let folder = tempfile::tempdir().unwrap();
        write(
            &folder.path().join("model.safetensors"),
            &tensors(&parameters, stored),
        );
        let source = HfFolder::open(folder.path(), &model).unwrap();
        let names: Vec<_> = parameters.iter().map(|p| p.name.clone()).collect();
        assert_eq!(source.names(), names);
        for (number, parameter) in parameters.iter().enumerate() {
            let expected: Vec<f32> = (0..parameter.num_elements())
                .map(|i| value(number, i))
                .collect();
            let found = source.read(&parameter.name).unwrap();
            assert_eq!(found, expected, "{stored} {}", parameter.name);
            let wide: Vec<f64> = expected.iter().map(|&x| x.into()).collect();
            assert_eq!(source.read_f64(&parameter.name).unwrap(), wide);
            assert_eq!(
                source.describe(&parameter.name).unwrap(),
                (parameter.shape.clone(), dtype)
            );
            let width: usize = parameter.shape.iter().skip(1).product();
            let read = |runs: &[_]| source.read_runs(&parameter.name, runs);
            let rows = width..3 * width;
            assert_eq!(read(std::slice::from_ref(&rows)).unwrap(), expected[rows]);
            // The second half of each row, as a rank's part of a matrix split by columns; then backwards.
            let mut runs: Vec<_> = (0..parameter.shape[0])
                .map(|row| row * width + width / 2..(row + 1) * width)
                .collect();
            for _ in 0..2 {
                let part: Vec<f32> = (runs.iter().cloned())
                    .flat_map(|run| expected[run].to_vec())
                    .collect();
                assert_eq!(read(&runs).unwrap(), part);
                runs.reverse();
            }
            assert!(read(&[]).unwrap().is_empty());
            let beyond = expected.len()..expected.len() + 1;
            assert_eq!(read(&[beyond]).unwrap_err().kind(), ErrorKind::Defect);
        }
        assert!(source.read("nothing").is_err());
    }
}

#[test]
fn shards_are_read_as_one() {
    let model = model(&config());
    let folder = tempfile::tempdir().unwrap();
    write_shards(folder.path(), &tensors(&model.parameters(), Dtype::BF16), 5);
    let source = HfFolder::open(folder.path(), &model).unwrap();
    for (number, parameter) in model.parameters().iter().enumerate() {
        assert_eq!(source.read(&parameter.name).unwrap()[1], value(number, 1));
    }
}

#[test]
fn a_key_in_two_shards_is_rejected() {
    // C05
    let model = model(&config());
    let folder = tempfile::tempdir().unwrap();
    let all = tensors(&model.parameters(), Dtype::F32);
    write_shards(folder.path(), &all, 5);
    write(
        &folder.path().join("model-00002-of-00002.safetensors"),
        &all[4..],
    );
    let error = open(folder.path(), &model);
    assert_eq!(error.context("tensor"), Some(all[4].0.as_str()));
    assert!(
        error
            .context("file")
            .unwrap()
            .ends_with("model-00002-of-00002.safetensors")
    );
    assert!(
        error
            .context("other file")
            .unwrap()
            .ends_with("model-00001-of-00002.safetensors")
    );
}

#[test]
fn a_missing_or_lying_shard_is_named() {
    let model = model(&config());
    let folder = tempfile::tempdir().unwrap();
    let all = tensors(&model.parameters(), Dtype::F32);
    write_shards(folder.path(), &all, 5);
    let second = folder.path().join("model-00002-of-00002.safetensors");
    write(&second, &all[6..]);
    let error = open(folder.path(), &model);
    assert!(error.context("missing").unwrap().starts_with(&all[5].0));
    fs::remove_file(&second).unwrap();
    let error = open(folder.path(), &model);
    assert_eq!(error.kind(), ErrorKind::File);
    assert!(
        error
            .context("file")
            .unwrap()
            .ends_with("model-00002-of-00002.safetensors")
    );
}

#[test]
fn an_index_is_not_trusted() {
    let model = model(&config());
    for map in [
        r#"{"weight_map": {"a": "../../etc/passwd"}}"#,
        r#"{"weight_map": {"a": "/etc/x.safetensors"}}"#,
        r#"{"weight_map": {"a": "x.safetensors", "a": "x.safetensors"}}"#,
        r#"{"weight_map": 3}"#,
        r#"{"weight_map": {}"#,
    ] {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("model.safetensors.index.json"), map).unwrap();
        let error = open(folder.path(), &model);
        assert!(
            error.context("file").unwrap().ends_with(".index.json"),
            "{map}: {error}"
        );
    }
}

#[test]
fn every_tensor_at_fault_is_listed() {
    let model = model(&config());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let mut all = tensors(&model.parameters(), Dtype::F32);
    let gone = [all.remove(2).0, all.remove(2).0];
    all[0].2.reverse();
    all.push((
        "model.layers.1.strange".to_owned(),
        Dtype::F32,
        vec![1],
        vec![0; 4],
    ));
    all.push(("score.weight".to_owned(), Dtype::F32, vec![1], vec![0; 4]));
    all.push((
        "model.rotary_emb.inv_freq".to_owned(),
        Dtype::F32,
        vec![2],
        vec![0; 8],
    ));
    write(&path, &all);
    let error = open(folder.path(), &model);
    assert_eq!(error.kind(), ErrorKind::File);
    assert_eq!(
        error.context("missing tensors"),
        Some(gone.join(", ").as_str())
    );
    let shapes = error.context("wrong shapes").unwrap();
    assert!(shapes.starts_with("model.embed_tokens.weight: found [8, 7], expected [7, 8]"));
    assert!(shapes.contains(path.to_str().unwrap()));
    let unexpected = error.context("unexpected tensors").unwrap();
    assert!(unexpected.contains("model.layers.1.strange") && unexpected.contains("score.weight"));
    assert!(!unexpected.contains("inv_freq"));
}

#[test]
fn a_tied_models_head_is_tolerated_if_it_is_the_embedding() {
    let mut config = config();
    config["tie_word_embeddings"] = json!(true);
    let model = model(&config);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let mut all = tensors(&model.parameters(), Dtype::F32);
    let mut head = all[0].clone();
    head.0 = "lm_head.weight".to_owned();
    all.push(head);
    write(&path, &all);
    let source = HfFolder::open(folder.path(), &model).unwrap();
    assert!(!source.names().contains(&"lm_head.weight".to_owned()));
    all.last_mut().unwrap().3[0] ^= 1;
    write(&path, &all);
    let error = open(folder.path(), &model);
    assert!(
        error
            .to_string()
            .contains("tied embedding, but another head"),
        "{error}"
    );
}

#[test]
fn integers_are_not_weights() {
    let model = model(&config());
    let folder = tempfile::tempdir().unwrap();
    let mut all = tensors(&model.parameters(), Dtype::F32);
    all[0].1 = Dtype::I32;
    write(&folder.path().join("model.safetensors"), &all);
    let error = open(folder.path(), &model);
    assert!(
        error
            .to_string()
            .contains("model.embed_tokens.weight: found i32"),
        "{error}"
    );
}

#[test]
fn a_folder_without_weights_says_what_it_looked_for() {
    let folder = tempfile::tempdir().unwrap();
    let error = open(folder.path(), &model(&config()));
    assert!(error.message().contains("model.safetensors.index.json"));
    fs::write(folder.path().join("pytorch_model.bin"), "").unwrap();
    let error = open(folder.path(), &model(&config()));
    assert!(error.to_string().contains("pickled"), "{error}");
}

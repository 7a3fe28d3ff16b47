use std::{fs, path::Path};

use half::bf16;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

use super::{config, model, tensors, write};
use crate::{
    DType, ErrorKind, Result, View,
    hf::{HfFolder, HfWriter, HfWriterOptions},
    model::ModelSpec,
    weights::{TensorSlice, WeightManifest, WeightSink, WeightSource},
};

fn manifest(model: &ModelSpec) -> WeightManifest {
    WeightManifest {
        tensors: model.parameters(),
        version: 0,
    }
}

fn send(sink: &mut HfWriter, name: &str, shape: &[usize], data: View<'_>) -> Result<()> {
    let slice = shape.iter().map(|&n| 0..n).collect();
    sink.bucket(&[TensorSlice {
        name,
        shape,
        slice,
        data,
        scale: None,
    }])
}

/// Streams a folder's weights as f32 masters.
fn export(from: &HfFolder, to: &Path, model: &ModelSpec, options: HfWriterOptions) -> Result<()> {
    let mut sink = HfWriter::new(to, model, options)?;
    sink.begin(&manifest(model))?;
    for parameter in model.parameters() {
        let values = from.read(&parameter.name)?;
        send(
            &mut sink,
            &parameter.name,
            &parameter.shape,
            (&values).into(),
        )?;
    }
    sink.commit()
}

/// A source folder in this dtype, with a NaN and an infinity.
fn source(folder: &Path, model: &ModelSpec, dtype: Dtype) -> HfFolder {
    let mut all = tensors(&model.parameters(), dtype);
    if dtype == Dtype::BF16 {
        for (i, bits) in [0x7f81u16, 0xffc1, 0x7f80, 0x8000, 0x0001]
            .into_iter()
            .enumerate()
        {
            all[0].3[2 * i..2 * i + 2].copy_from_slice(&bits.to_le_bytes());
        }
    }
    write(&folder.join("model.safetensors"), &all);
    fs::write(folder.join("tokenizer.json"), "{\"t\": 1}").unwrap();
    fs::write(folder.join("chat_template.jinja"), "{{ x }}").unwrap();
    fs::write(folder.join("README.md"), "not copied").unwrap();
    HfFolder::open(folder, model).unwrap()
}

fn read_config(folder: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(folder.join("config.json")).unwrap()).unwrap()
}

fn entries(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = (fs::read_dir(folder).unwrap())
        .map(|e| e.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

#[test]
fn bf16_in_and_out_is_byte_equal() {
    // C08, C06
    let (folder, model) = (tempfile::tempdir().unwrap(), model(&config()));
    let (from, to) = (folder.path().join("from"), folder.path().join("to"));
    fs::create_dir(&from).unwrap();
    let source = source(&from, &model, Dtype::BF16);
    let options = HfWriterOptions {
        source_folder: Some(from.clone()),
        ..Default::default()
    };
    export(&source, &to, &model, options).unwrap();
    let (a, b) = (
        fs::read(from.join("model.safetensors")),
        fs::read(to.join("model.safetensors")),
    );
    let (a, b) = (a.unwrap(), b.unwrap());
    let (old, new) = (
        SafeTensors::deserialize(&a).unwrap(),
        SafeTensors::deserialize(&b).unwrap(),
    );
    assert_eq!(old.len(), new.len());
    for (name, tensor) in old.iter() {
        assert_eq!(new.tensor(name).unwrap(), tensor, "{name}");
    }
    let (_, header) = SafeTensors::read_metadata(&b).unwrap();
    assert_eq!(header.metadata().as_ref().unwrap()["format"], "pt");
    assert_eq!(read_config(&to), config());
    assert_eq!(
        entries(&to),
        [
            "chat_template.jinja",
            "config.json",
            "model.safetensors",
            "tokenizer.json"
        ]
    );
    assert_eq!(entries(folder.path()), ["from", "to"]);
    // The folder is a model again, and may be replaced by the next export.
    let reread = ModelSpec::from_folder(&to).unwrap();
    assert_eq!(reread, model);
    export(&source, &to, &model, HfWriterOptions::default()).unwrap();
    assert_eq!(entries(&to), ["config.json", "model.safetensors"]);
}

#[test]
fn shards_and_another_dtype_are_said_truly() {
    let (folder, mut config) = (tempfile::tempdir().unwrap(), config());
    let model = model(&config);
    let (from, to) = (folder.path().join("from"), folder.path().join("to"));
    fs::create_dir(&from).unwrap();
    let source = source(&from, &model, Dtype::F32);
    let options = HfWriterOptions {
        dtype: Some(DType::F32),
        shard_bytes: 400,
        source_folder: None,
        finite: false,
    };
    export(&source, &to, &model, options).unwrap();
    let index: Value =
        serde_json::from_slice(&fs::read(to.join("model.safetensors.index.json")).unwrap())
            .unwrap();
    let total = 4 * model.num_parameters();
    assert_eq!(index["metadata"]["total_size"], json!(total));
    let shards: Vec<_> = entries(&to)
        .into_iter()
        .filter(|n| n.ends_with(".safetensors"))
        .collect();
    let count = shards.len();
    assert!(count > 2);
    assert_eq!(shards[0], format!("model-00001-of-{count:05}.safetensors"));
    let written = HfFolder::open(&to, &model).unwrap();
    for name in source.names() {
        assert_eq!(written.read(&name).unwrap(), source.read(&name).unwrap());
        assert_eq!(written.describe(&name).unwrap().1, DType::F32);
    }
    config["torch_dtype"] = json!("float32");
    assert_eq!(read_config(&to), config);
    config.as_object_mut().unwrap().shift_remove("torch_dtype");
    let unsaid = super::model(&config);
    let options = HfWriterOptions {
        dtype: Some(DType::F16),
        ..Default::default()
    };
    export(&source, &to, &unsaid, options).unwrap();
    assert_eq!(read_config(&to)["dtype"], json!("float16"));
    assert!(!to.join("model.safetensors.index.json").exists());
}

#[test]
fn nothing_half_written_is_left() {
    let (folder, model) = (tempfile::tempdir().unwrap(), model(&config()));
    let to = folder.path().join("to");
    let list = model.parameters();
    let (name, shape) = (list[0].name.as_str(), list[0].shape.as_slice());
    let values = vec![1.0f32; list[0].num_elements()];
    let begin = || {
        let mut sink = HfWriter::new(&to, &model, HfWriterOptions::default()).unwrap();
        sink.begin(&manifest(&model)).unwrap();
        send(&mut sink, name, shape, (&values).into()).unwrap();
        sink
    };
    begin().abort();
    assert!(entries(folder.path()).is_empty());
    drop(begin());
    assert!(entries(folder.path()).is_empty());
    let error = begin().commit().unwrap_err();
    assert!(
        error.context("missing").unwrap().starts_with(&list[1].name),
        "{error}"
    );
    assert!(entries(folder.path()).is_empty());
    // Twice, too short, unannounced.
    assert!(send(&mut begin(), name, shape, (&values).into()).is_err());
    assert!(
        send(
            &mut begin(),
            &list[1].name,
            &list[1].shape,
            (&values).into()
        )
        .is_err()
    );
    assert!(send(&mut begin(), "x", &[1], [1.0f32].as_slice().into()).is_err());
    assert!(entries(folder.path()).is_empty());
    let mut short = manifest(&model);
    short.tensors.pop();
    let mut sink = HfWriter::new(&to, &model, HfWriterOptions::default()).unwrap();
    assert_eq!(sink.begin(&short).unwrap_err().kind(), ErrorKind::Defect);
}

#[test]
fn a_users_files_are_never_removed() {
    let (folder, model) = (tempfile::tempdir().unwrap(), model(&config()));
    let to = folder.path().join("to");
    fs::create_dir(&to).unwrap();
    HfWriter::new(&to, &model, HfWriterOptions::default()).unwrap();
    fs::write(to.join("config.json"), "{}").unwrap();
    HfWriter::new(&to, &model, HfWriterOptions::default()).unwrap();
    fs::write(to.join("thesis.tex"), "years of work").unwrap();
    let error = HfWriter::new(&to, &model, HfWriterOptions::default()).unwrap_err();
    assert_eq!(
        (error.kind(), error.context("found")),
        (ErrorKind::File, Some("thesis.tex"))
    );
    let error = HfWriter::new(to.join("thesis.tex"), &model, HfWriterOptions::default());
    assert_eq!(error.unwrap_err().kind(), ErrorKind::File);
    // Below a file there is no folder: found before the training, not after it.
    let below = to.join("thesis.tex/export");
    let error = HfWriter::new(below, &model, HfWriterOptions::default()).unwrap_err();
    assert!(
        error.context("file").unwrap().contains("thesis.tex"),
        "{error}"
    );
}

#[test]
fn a_value_that_does_not_fit_is_an_error() {
    let (folder, model) = (tempfile::tempdir().unwrap(), model(&config()));
    let list = model.parameters();
    let options = HfWriterOptions {
        dtype: Some(DType::F16),
        ..Default::default()
    };
    let mut values = vec![bf16::from_f32(1.0); list[0].num_elements()];
    values[3] = bf16::from_f32(1e6);
    let mut sink = HfWriter::new(folder.path().join("to"), &model, options).unwrap();
    sink.begin(&manifest(&model)).unwrap();
    let error = send(&mut sink, &list[0].name, &list[0].shape, (&values).into()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NonFinite);
    assert_eq!(error.context("tensor"), Some(list[0].name.as_str()));
    let ids = HfWriterOptions {
        dtype: Some(DType::I32),
        ..Default::default()
    };
    let error = HfWriter::new(folder.path().join("to"), &model, ids).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    drop(sink);
    assert!(entries(folder.path()).is_empty());
}

/// The body of `a_full_disk_leaves_one_clear_error`, run in a process of its own.
const FULL_DISK: &str = "DRIVETRAIN_TEST_FULL_DISK";

#[test]
fn a_full_disk_leaves_one_clear_error() {
    if let Some(to) = std::env::var_os(FULL_DISK) {
        let mut config = config();
        config["hidden_size"] = json!(4096);
        let model = model(&config);
        let list = model.parameters();
        let values = vec![1.0f32; list[0].num_elements()];
        let mut sink = HfWriter::new(Path::new(&to), &model, HfWriterOptions::default()).unwrap();
        sink.begin(&manifest(&model)).unwrap();
        let error = send(&mut sink, &list[0].name, &list[0].shape, (&values).into()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::File);
        assert!(
            error
                .context("file")
                .unwrap()
                .ends_with("model.safetensors"),
            "{error}"
        );
        assert!(error.to_string().contains("free space"), "{error}");
        return;
    }
    // A limit on file sizes fails a write half-way, as a full disk does, and needs no privilege.
    let folder = tempfile::tempdir().unwrap();
    let script = "trap '' XFSZ; ulimit -f 16; exec \"$0\" --exact \"$1\" --nocapture";
    let output = std::process::Command::new("sh")
        .args(["-c", script])
        .arg(std::env::current_exe().unwrap())
        .arg("hf::tests::writer::a_full_disk_leaves_one_clear_error")
        .env(FULL_DISK, folder.path().join("to"))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}"
    );
    assert!(entries(folder.path()).is_empty());
}

#[test]
fn the_source_is_not_its_own_place() {
    let (folder, model) = (tempfile::tempdir().unwrap(), model(&config()));
    let from = folder.path().join("from");
    fs::create_dir(&from).unwrap();
    source(&from, &model, Dtype::F32);
    let before = fs::read(from.join("model.safetensors")).unwrap();
    std::os::unix::fs::symlink("from", folder.path().join("link")).unwrap();
    for place in ["from", "./from/", "link"] {
        let options = HfWriterOptions {
            source_folder: Some(from.clone()),
            ..Default::default()
        };
        let error = HfWriter::new(folder.path().join(place), &model, options).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{place}");
    }
    assert_eq!(fs::read(from.join("model.safetensors")).unwrap(), before);
}

#[test]
fn where_only_finite_weights_are_wanted_another_is_named() {
    let (folder, model) = (tempfile::tempdir().unwrap(), model(&config()));
    let (from, to) = (folder.path().join("from"), folder.path().join("to"));
    fs::create_dir(&from).unwrap();
    // With a NaN in the first tensor.
    let source = source(&from, &model, Dtype::BF16);
    let options = HfWriterOptions {
        finite: true,
        ..Default::default()
    };
    let error = export(&source, &to, &model, options).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NonFinite);
    let first = &model.parameters()[0].name;
    assert_eq!(error.context("tensor"), Some(first.as_str()));
    assert_eq!(entries(folder.path()), ["from"]);
}

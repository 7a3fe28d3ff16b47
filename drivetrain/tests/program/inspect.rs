//! What `drivetrain inspect` says of checkpoints and models, whole and damaged.

use std::os::unix::fs::FileExt;

use serde_json::{Value, json};

use crate::support::{Job, Ran, engines, golden};

fn report(ran: Ran) -> Value {
    serde_json::from_str(&ran.exits(0).stdout()).unwrap()
}

/// A run of two ranks under one engine, with checkpoints of steps 3 and 5.
fn trained(engine: &str) -> Job {
    let job = Job::new();
    let backend = format!("backend={engine}");
    let ranks = "parallel.data_parallel_size=2";
    job.run(&["train", "job.yaml", "--set", &backend, "--set", ranks])
        .exits(0);
    job
}

#[test]
fn a_checkpoint_is_told_piece_by_piece() {
    for engine in engines() {
        let job = trained(engine);
        let store = report(job.run(&["inspect", "run/checkpoints", "--json"]));
        assert_eq!(
            (&store["kind"], &store["steps"]),
            (&json!("store"), &json!([3, 5]))
        );
        let arguments = [
            "inspect",
            "run/checkpoints/step-00000005",
            "--json",
            "--verify",
        ];
        let found = report(job.run(&arguments));
        assert_eq!(found["kind"], "checkpoint");
        for key in ["step", "files", "tensors", "identity", "blobs"] {
            assert_eq!(found[key], store["newest"][key], "{key}");
        }
        assert_eq!(
            (&store["newest"]["verified"], &found["verified"]),
            (&Value::Null, &json!(true))
        );
        assert_eq!(
            (&found["step"], &found["world_size"]),
            (&json!(5), &json!(2))
        );
        assert_eq!(found["identity"]["backend"], engine);
        let layout = &found["blobs"]["layout"];
        assert_eq!(
            layout["data_shard"].as_u64().unwrap() * layout["data_replicate"].as_u64().unwrap(),
            2
        );
        assert_eq!(found["blobs"]["data"]["epoch"], 1);
        // Every tensor thrice, and every element of it in one piece.
        let tensors = found["tensors"].as_array().unwrap();
        let model = report(job.run(&["inspect", "run/model", "--json", "--verify"]));
        assert_eq!(model["kind"], "model");
        assert_eq!(
            tensors.len(),
            3 * model["tensors"].as_array().unwrap().len()
        );
        for tensor in tensors {
            let whole: u64 = tensor["shape"]
                .as_array()
                .unwrap()
                .iter()
                .map(|n| n.as_u64().unwrap())
                .product();
            let pieces = tensor["pieces"].as_array().unwrap();
            let sum: u64 = pieces.iter().map(|p| p["elements"].as_u64().unwrap()).sum();
            assert_eq!((sum, &tensor["dtype"]), (whole, &json!("f32")), "{tensor}");
            assert!(
                pieces
                    .iter()
                    .all(|p| p["checksum"].as_str().unwrap().len() == 16)
            );
            let named = model["tensors"]
                .as_array()
                .unwrap()
                .iter()
                .find(|t| t["name"] == tensor["name"]);
            assert_eq!(named.unwrap()["shape"], tensor["shape"]);
        }
        let counted: u64 = found["files"]
            .as_array()
            .unwrap()
            .iter()
            .map(|f| f["pieces"].as_u64().unwrap())
            .sum();
        assert_eq!(
            counted as usize,
            tensors
                .iter()
                .map(|t| t["pieces"].as_array().unwrap().len())
                .sum::<usize>()
        );
        let text = job
            .run(&["inspect", "run/checkpoints", "--verify"])
            .exits(0)
            .stdout();
        for part in [
            "steps [3, 5]",
            "step 5",
            engine,
            "rank-00001",
            "exp_avg_sq",
            "\"epoch\":1",
            "data_shard",
            "model.layers.0.mlp.up_proj.weight",
            "every checksum is right",
        ] {
            assert!(text.contains(part), "{part:?} is not in:\n{text}");
        }
    }
}

/// C07: the tensor and the file, by `inspect` and by a resume alike.
#[test]
fn a_flipped_byte_is_named_with_its_tensor_and_file() {
    let job = trained(engines()[0]);
    let path = job.path("run/checkpoints/step-00000005/rank-00001.safetensors");
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    // The last byte is the last piece's.
    let last = file.metadata().unwrap().len() - 1;
    let mut byte = [0];
    file.read_exact_at(&mut byte, last).unwrap();
    file.write_all_at(&[byte[0] ^ 1], last).unwrap();
    // Without --verify nothing is read of it.
    job.run(&["inspect", "run/checkpoints"]).exits(0);
    let verify = ["inspect", "run/checkpoints", "--verify"];
    let said = job.run(&verify).exits(3).stderr();
    let metrics = job.text("run/metrics.jsonl");
    let more = ["train", "job.yaml", "--resume", "--set", "steps=7", "--set"];
    let resumed = job
        .run(&[&more[..], &["parallel.data_parallel_size=2"]].concat())
        .exits(3)
        .stderr();
    for text in [&said, &resumed] {
        for part in [
            "checksum is wrong",
            "rank-00001.safetensors",
            "tensor = model.",
            "help",
        ] {
            assert!(text.contains(part), "{part:?} is not in:\n{text}");
        }
    }
    assert_eq!(job.text("run/metrics.jsonl"), metrics);
}

#[test]
fn what_is_neither_is_refused_with_what_there_is() {
    let job = trained(engines()[0]);
    for (folder, part) in [
        ("nowhere", "no such folder"),
        ("job.yaml", "not a folder"),
        (".", "no checkpoint and no model"),
        ("run", "`checkpoints` or its `model`"),
    ] {
        job.run(&["inspect", folder])
            .exits(3)
            .says(&[part, folder, "help"]);
    }
    for step in ["step-00000003", "step-00000005"] {
        std::fs::remove_file(job.path("run/checkpoints").join(step).join("manifest.json")).unwrap();
    }
    let ran = job.run(&["inspect", "run/checkpoints"]).exits(3);
    let text = ran.stdout();
    assert!(
        text.contains("step-00000003: incomplete") && text.contains("manifest.json"),
        "{text}"
    );
}

#[test]
fn a_model_that_is_damaged_is_named() {
    let job = Job::new();
    let folder = job.copy_model("model");
    report(job.run(&["inspect", "model", "--verify", "--json"]));
    let path = folder.join("model.safetensors");
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    let len = file.metadata().unwrap().len();
    file.write_all_at(&f32::NAN.to_le_bytes(), len - 4).unwrap();
    job.run(&["inspect", "model"]).exits(0);
    job.run(&["inspect", "model", "--verify"]).exits(3).says(&[
        "not finite",
        "model.safetensors",
        "tensor = ",
        "element = ",
    ]);
    file.set_len(len - 1).unwrap();
    job.run(&["inspect", "model"])
        .exits(3)
        .says(&["model.safetensors", "length"]);
    // A family that is not trained can be looked at all the same.
    let other = golden("llama_mha").join("model.safetensors");
    std::fs::copy(other, path).unwrap();
    job.write("model/config.json", r#"{"model_type": "gpt2"}"#);
    job.run(&["inspect", "model"]).exits(0);
}

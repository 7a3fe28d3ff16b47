//! Bad input: one clear error naming the file and the place, a documented exit code, nothing half-written.

use std::path::Path;

use crate::support::{Job, golden};

/// A copy of a golden folder that a test may damage.
fn damaged(job: &Job, damage: impl FnOnce(&Path)) -> String {
    let folder = job.copy_model("model");
    damage(&folder);
    format!("model={}", folder.display())
}

fn untouched(job: &Job) {
    assert!(!job.path("run/model").exists() && !job.path("run/checkpoints").exists());
    let left: Vec<_> = std::fs::read_dir(job.path("."))
        .unwrap()
        .flatten()
        .map(|e| e.file_name())
        .collect();
    assert!(
        left.iter()
            .all(|n| !n.to_string_lossy().starts_with(".tmp")),
        "{left:?}"
    );
}

#[test]
fn truncated_weights() {
    let job = Job::new();
    let model = damaged(&job, |folder| {
        let path = folder.join("model.safetensors");
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
    });
    job.run(&["train", "job.yaml", "--set", &model])
        .exits(3)
        .says(&["model.safetensors"]);
    untouched(&job);
}

#[test]
fn a_hostile_header_length() {
    let job = Job::new();
    let model = damaged(&job, |folder| {
        std::fs::write(folder.join("model.safetensors"), u64::MAX.to_le_bytes()).unwrap();
    });
    job.run(&["train", "job.yaml", "--set", &model])
        .exits(3)
        .says(&["model.safetensors"]);
    untouched(&job);
}

#[test]
fn a_missing_shard() {
    let job = Job::new();
    let model = damaged(&job, |folder| {
        std::fs::remove_file(folder.join("model.safetensors")).unwrap();
        std::fs::write(
            folder.join("model.safetensors.index.json"),
            r#"{"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}"#,
        )
        .unwrap();
    });
    job.run(&["train", "job.yaml", "--set", &model])
        .exits(3)
        .says(&["model-00001-of-00002.safetensors"]);
    untouched(&job);
}

#[test]
fn an_unsupported_family() {
    let job = Job::new();
    let model = damaged(&job, |folder| {
        std::fs::write(
            folder.join("config.json"),
            r#"{"model_type": "gpt2", "vocab_size": 9}"#,
        )
        .unwrap();
    });
    job.run(&["train", "job.yaml", "--set", &model])
        .exits(2)
        .says(&["gpt2", "config.json"]);
    untouched(&job);
}

#[test]
fn an_empty_data_file() {
    let job = Job::new();
    job.write("data.jsonl", "");
    job.run(&["train", "job.yaml"])
        .exits(3)
        .says(&["data.jsonl"]);
    untouched(&job);
}

#[test]
fn a_token_outside_the_vocabulary() {
    let job = Job::new();
    job.write(
        "data.jsonl",
        "{\"tokens\": [1, 2, 3]}\n{\"tokens\": [1, 256, 3]}\n",
    );
    job.run(&["train", "job.yaml"])
        .exits(3)
        .says(&["data.jsonl", "256", "2"]);
    untouched(&job);
}

#[test]
fn a_sequence_over_the_limit() {
    let job = Job::new();
    let long: Vec<usize> = (0..129).map(|t| t % 256).collect();
    job.write(
        "data.jsonl",
        &format!("{{\"tokens\": [1, 2, 3]}}\n{{\"tokens\": {long:?}}}\n"),
    );
    job.run(&["train", "job.yaml"])
        .exits(3)
        .says(&["data.jsonl", "129", "128"]);
    untouched(&job);
    job.run(&["train", "job.yaml", "--set", "data.overlong=truncate"])
        .exits(0)
        .says(&["1 sequences were cut"]);
}

#[test]
fn an_output_that_cannot_be_written() {
    let job = Job::new();
    job.write("file", "");
    job.run(&["train", "job.yaml", "--set", "output=file/run"])
        .exits(2)
        .says(&["OUT-01", "file"]);
    job.run(&[
        "score",
        "--model",
        &golden("llama_mha").display().to_string(),
        "--backend",
        crate::support::engines()[0],
        "--data",
        "data.jsonl",
        "--out",
        "file/scores.jsonl",
    ])
    .exits(3)
    .says(&["file/scores.jsonl"]);
}

#[test]
fn a_job_that_is_not_there_and_one_that_is_not_yaml() {
    let job = Job::new();
    job.run(&["train", "absent.yaml"])
        .exits(2)
        .says(&["absent.yaml"]);
    job.write("broken.yaml", "model: [1, 2\nsteps: }");
    job.run(&["check", "broken.yaml"])
        .exits(2)
        .says(&["CFG-00"]);
    job.run(&["train"]).exits(2);
    job.run(&["fly"]).exits(2);
}

/// Found when the data is opened, before any weight is read: the file, the column, a remedy; and nothing is left.
#[test]
fn data_without_the_columns_of_its_objective() {
    let job = Job::new();
    for command in ["train", "compare"] {
        job.run(&[command, "job.yaml", "--set", "objective.kind=ppo"])
            .exits(3)
            .says(&["data.jsonl", "column = advantages", "help"]);
        assert!(!job.path("run").exists());
    }
}

/// What an option is given is told as that option's fault.
#[test]
fn options_of_score_that_are_out_of_range_are_named() {
    let job = Job::new();
    let model = golden("llama_mha").display().to_string();
    let engine = crate::support::engines()[0];
    let score = ["score", "--model", &model, "--backend", engine];
    let files = ["--data", "data.jsonl", "--out", "scores.jsonl"];
    for (option, value) in [
        ("--temperature", "nan"),
        ("--temperature", "0"),
        ("--temperature", "1e39"),
        ("--temperature", "warm"),
        ("--batch-size", "0"),
        ("--batch-size", "16777217"),
    ] {
        let given = format!("{option}={value}");
        let ran = job.run(&[&score[..], &files, &[&given]].concat()).exits(2);
        let text = ran.stderr();
        assert!(text.contains(option) && text.contains(value), "{text}");
        assert!(
            !text.contains("objective") && !text.contains("line"),
            "{text}"
        );
    }
    assert!(!job.path("scores.jsonl").exists());
}

#[test]
fn an_engine_is_not_compared_with_itself() {
    let job = Job::new();
    let engine = crate::support::engines()[0];
    let twice = format!("reference,{engine},{engine}");
    job.run(&["compare", "job.yaml", "--backends", &twice])
        .exits(2)
        .says(&["twice", engine, &twice]);
}

/// A person reads an exponent; three hundred digits nobody does.
#[test]
fn numbers_of_hundreds_of_digits_are_written_short() {
    let job = Job::new();
    let timeout = ["check", "job.yaml", "--set", "timeout_seconds=1e300"];
    let text = job
        .run(&timeout)
        .exits(2)
        .says(&["TIME-01", "1e300"])
        .stderr();
    assert!(!text.contains("00000000000000000000"), "{text}");
    let config = std::fs::read_to_string(golden("llama_mha").join("config.json")).unwrap();
    job.copy_model("model");
    let config = config.replace("\"rms_norm_eps\": 1e-05", "\"rms_norm_eps\": -1e300");
    assert!(config.contains("-1e300"), "{config}");
    job.write("model/config.json", &config);
    let model = ["check", "job.yaml", "--set", "model=model"];
    let text = job
        .run(&model)
        .exits(2)
        .says(&["MODEL-02", "-1e300"])
        .stderr();
    assert!(!text.contains("00000000000000000000"), "{text}");
}

#[test]
fn a_resume_of_nothing_says_what_it_looked_for() {
    let job = Job::new();
    job.run(&["train", "job.yaml", "--resume"]).exits(3).says(&[
        "run/checkpoints",
        "step-NNNNNNNN",
        "no such folder",
        "--resume",
    ]);
    std::fs::create_dir_all(job.path("run/checkpoints/step-00000003")).unwrap();
    job.run(&["train", "job.yaml", "--resume"]).exits(3).says(&[
        "step-00000003",
        "manifest.json",
        "found = ",
    ]);
}

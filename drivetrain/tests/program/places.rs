//! Outputs never overwrite what is read, nor another run; a failed start leaves nothing behind.

use crate::support::{Job, bytes, engines, golden};

#[test]
fn an_output_that_would_overwrite_what_the_job_reads_is_refused() {
    let job = Job::new();
    job.copy_model("taken/model");
    job.write("taken/metrics.jsonl", &job.text("data.jsonl"));
    job.write("taken/job.yaml", &job.text("job.yaml"));
    let before = bytes(&job.path("taken/model/model.safetensors"));
    let cases: [&[&str]; 5] = [
        &[
            "job.yaml",
            "--set",
            "model=taken/model",
            "--set",
            "output=taken",
        ],
        &[
            "job.yaml",
            "--set",
            "model=taken/model",
            "--set",
            "output=taken/model",
        ],
        &[
            "job.yaml",
            "--set",
            "data.train=taken/metrics.jsonl",
            "--set",
            "output=taken",
        ],
        &["job.yaml", "--set", "output=."],
        &[
            "taken/job.yaml",
            "--set",
            "data.train=data.jsonl",
            "--set",
            "output=taken",
        ],
    ];
    for arguments in cases {
        for command in ["check", "train"] {
            let all: Vec<&str> = [command].iter().chain(arguments).copied().collect();
            job.run(&all).exits(2).says(&["OUT-02", "overwritten"]);
        }
    }
    assert_eq!(bytes(&job.path("taken/model/model.safetensors")), before);
    assert_eq!(job.text("taken/job.yaml"), job.text("job.yaml"));
    assert!(!job.path("checkpoints").exists() && !job.path("taken/checkpoints").exists());
}

/// The file that a run wrote is nobody's handiwork: it may be written again.
#[test]
fn the_job_that_a_run_saved_goes_on() {
    let job = Job::new();
    job.run(&["train", "job.yaml"]).exits(0);
    job.run(&["train", "run/job.yaml", "--resume", "--set", "steps=7"])
        .exits(0);
    assert_eq!(job.metric("run", "loss").len(), 7);
}

#[test]
fn an_export_does_not_replace_the_model_it_comes_from() {
    let job = Job::new();
    job.copy_model("model");
    job.run(&["train", "job.yaml", "--set", "model=model"])
        .exits(0);
    let before = bytes(&job.path("model/model.safetensors"));
    let export = |out: &str| {
        let checkpoint = ["export", "--checkpoint", "run/checkpoints"];
        let rest = ["--model", "model", "--out", out];
        job.run(&[&checkpoint[..], &rest].concat())
    };
    export("model").exits(2).says(&["the model it comes from"]);
    export("run/checkpoints/step-00000003").exits(3);
    assert_eq!(bytes(&job.path("model/model.safetensors")), before);
    export("out").exits(0);
}

#[test]
fn scores_and_reports_do_not_replace_an_input() {
    let job = Job::new();
    job.copy_model("model");
    let data = job.text("data.jsonl");
    std::os::unix::fs::symlink("data.jsonl", job.path("link.jsonl")).unwrap();
    for out in [
        "data.jsonl",
        "./link.jsonl",
        "model/config.json",
        "model/scores.jsonl",
    ] {
        let score = ["score", "--model", "model", "--backend", engines()[0]];
        job.run(&[&score[..], &["--data", "data.jsonl", "--out", out]].concat())
            .exits(2)
            .says(&["--out would write over"]);
    }
    job.run(&[
        "compare", "job.yaml", "--steps", "1", "--report", "job.yaml",
    ])
    .exits(2)
    .says(&["--report would write over the job"]);
    assert_eq!(job.text("data.jsonl"), data);
    assert!(job.text("job.yaml").contains("global_batch_size"));
}

#[test]
fn a_failed_start_leaves_nothing_and_the_next_one_runs() {
    let job = Job::new();
    job.write("broken.jsonl", "{\"tokens\": [1, 2\n");
    job.copy_model("model");
    job.write("model/model.safetensors", "no weights");
    for fault in ["data.train=broken.jsonl", "model=model"] {
        job.run(&["train", "job.yaml", "--set", fault]).exits(3);
        assert!(!job.path("run").exists(), "{fault}");
    }
    let validation = ["--set", "data.validation=broken.jsonl"];
    job.run(
        &[
            &["train", "job.yaml", "--set", "validation.every=2"][..],
            &validation,
        ]
        .concat(),
    )
    .exits(3);
    assert!(!job.path("run").exists());
    // Without passes it is not read, as DATA-03 says.
    job.run(&[&["train", "job.yaml"][..], &validation].concat())
        .exits(0)
        .says(&["DATA-03"]);
}

/// What cannot take the model in the end is refused before the first step.
#[test]
fn a_place_that_cannot_take_the_model_is_found_before_the_training() {
    let job = Job::new();
    std::fs::create_dir_all(job.path("run/model")).unwrap();
    job.write("run/model/notes.txt", "mine");
    job.run(&["train", "job.yaml"])
        .exits(3)
        .says(&["holds another run", "--overwrite"]);
    job.run(&["train", "job.yaml", "--overwrite"])
        .exits(3)
        .says(&["notes.txt", "what an export does not write"]);
    assert_eq!(job.text("run/model/notes.txt"), "mine");
    assert!(!job.path("run/metrics.jsonl").exists() && !job.path("run/job.yaml").exists());
}

#[test]
fn a_model_that_cannot_be_written_leaves_a_checkpoint() {
    let job = Job::new();
    let steps = ["--set", "steps=400", "--set", "checkpoint.every=null"];
    let child = job.start(&[&["train", "job.yaml"][..], &steps].concat());
    job.wait_for("run/metrics.jsonl", |text| text.lines().count() > 1);
    std::fs::create_dir_all(job.path("run/model")).unwrap();
    job.write("run/model/notes.txt", "mine");
    let ran = child.ends().exits(3);
    ran.says(&["what an export does not write", "saved as a checkpoint"]);
    std::fs::remove_file(job.path("run/model/notes.txt")).unwrap();
    let ran = job
        .run(&[&["train", "job.yaml", "--resume"][..], &steps].concat())
        .exits(0);
    assert!(
        ran.stdout().contains("no step was left"),
        "{}",
        ran.stdout()
    );
    assert!(job.path("run/model/model.safetensors").is_file());
    assert_eq!(job.metric("run", "loss").len(), 400);
}

#[test]
fn a_second_run_is_refused_while_the_first_goes_on() {
    let job = Job::new();
    let steps = ["--set", "steps=1000000", "--set", "checkpoint.every=null"];
    let child = job.start(&[&["train", "job.yaml"][..], &steps].concat());
    job.wait_for("run/metrics.jsonl", |text| text.lines().count() > 1);
    for more in [&[][..], &["--resume"], &["--overwrite"]] {
        job.run(&[&["train", "job.yaml"][..], more].concat())
            .exits(3)
            .says(&["another run is writing", &child.id()]);
    }
    child.kill("-KILL");
    // Killed without a checkpoint there is nothing to lose, and no lock is left.
    job.run(&["train", "job.yaml"]).exits(0);
    assert_eq!(job.metric("run", "loss").len(), 5);
}

#[test]
fn another_run_is_lost_only_if_asked() {
    let job = Job::new();
    let whole = ["train", "job.yaml", "--set", "checkpoint.every=null"];
    job.run(&whole).exits(0);
    let model = bytes(&job.path("run/model/model.safetensors"));
    // Finished, without a checkpoint: not to be resumed, and not to be lost unasked.
    let refused = job.run(&whole).exits(3);
    assert!(
        !refused.stderr().contains("--resume"),
        "{}",
        refused.stderr()
    );
    refused.says(&["a trained model", "--overwrite"]);
    assert_eq!(bytes(&job.path("run/model/model.safetensors")), model);
    job.run(&["train", "job.yaml", "--overwrite", "--resume"])
        .exits(2);
    let fewer = ["--overwrite", "--set", "steps=2"];
    job.run(&[&["train", "job.yaml"][..], &["--overwrite"]].concat())
        .exits(0);
    job.run(&[&["train", "job.yaml"][..], &fewer].concat())
        .exits(0);
    assert_eq!(job.metric("run", "loss").len(), 2);
    let mut left: Vec<_> = std::fs::read_dir(job.path("run/checkpoints"))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    assert_eq!(left, ["step-00000002"]);
}

#[test]
fn what_is_too_long_is_counted_wherever_data_is_read() {
    let job = Job::new();
    let line = |length: usize| format!("{{\"tokens\": {:?}}}", vec![1; length]);
    job.write(
        "long.jsonl",
        &[line(5), line(40), line(6), line(50)].join("\n"),
    );
    let cut = [
        "--set",
        "data.max_length=30",
        "--set",
        "data.overlong=truncate",
    ];
    let left_out = ["--set", "data.max_length=30", "--set", "data.overlong=skip"];
    let model = golden("llama_mha").display().to_string();
    let score = ["score", "--model", &model, "--backend", engines()[0]];
    let files = ["--data", "long.jsonl", "--out", "scores.jsonl"];
    job.run(&[&score[..], &files, &left_out].concat())
        .exits(2)
        .says(&["data.overlong: skip"]);
    job.run(&[&score[..], &files, &cut].concat())
        .exits(0)
        .says(&["long.jsonl: 2 sequences were cut"]);
    let rows: Vec<usize> = (job.text("scores.jsonl").lines())
        .map(|l| l.split("\"entropy\"").next().unwrap().split(',').count() - 1)
        .collect();
    assert_eq!(rows, [5, 30, 6, 30]);
    let data = ["--set", "data.train=long.jsonl", "--set", "steps=1"];
    let steps = [
        "compare",
        "job.yaml",
        "--steps",
        "1",
        "--backends",
        engines()[0],
    ];
    job.run(&[&steps[..], &data, &left_out].concat())
        .exits(0)
        .says(&["long.jsonl: 2 sequences were left out"]);
    let validation = [
        "--set",
        "data.validation=long.jsonl",
        "--set",
        "validation.every=1",
    ];
    job.run(&[&["train", "job.yaml"][..], &validation, &left_out].concat())
        .exits(0)
        .says(&["long.jsonl: 2 sequences were left out"]);
}

#[test]
fn scoring_takes_only_keys_that_it_reads() {
    let job = Job::new();
    let model = golden("llama_mha").display().to_string();
    let score = ["score", "--model", &model, "--backend", engines()[0]];
    let files = ["--data", "data.jsonl", "--out", "scores.jsonl"];
    for key in [
        "backend=reference",
        "steps=3",
        "objective.temperature=2",
        "data={}",
    ] {
        job.run(&[&score[..], &files, &["--set", key]].concat())
            .exits(2)
            .says(&["--set", key.split('=').next().unwrap()]);
    }
    assert!(!job.path("scores.jsonl").exists());
}

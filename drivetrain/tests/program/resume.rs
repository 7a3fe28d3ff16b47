//! Checkpoints that are broken or past the end, metrics of skipped steps, weights that are not finite.

use crate::support::{Job, engines, golden};

/// A final checkpoint is saved where checkpoints are, so that a longer job goes on from it.
#[test]
fn a_finished_run_is_made_longer() {
    let job = Job::new();
    job.run(&["train", "job.yaml"]).exits(0);
    job.run(&["train", "job.yaml", "--resume", "--set", "steps=8"])
        .exits(0);
    let whole = ["--set", "output=whole", "--set", "steps=8"];
    job.run(&[&["train", "job.yaml"][..], &whole].concat())
        .exits(0);
    assert_eq!(job.metric("run", "step").len(), 8);
    assert_eq!(job.metric("run", "loss"), job.metric("whole", "loss"));
    let metrics = job.text("run/metrics.jsonl");
    job.run(&["train", "job.yaml", "--resume", "--set", "steps=4"])
        .exits(2)
        .says(&["checkpoint = step 8", "steps = 4"]);
    assert_eq!(job.text("run/metrics.jsonl"), metrics);
}

#[test]
fn a_damaged_checkpoint_is_passed_over_aloud() {
    let job = Job::new();
    job.run(&["train", "job.yaml"]).exits(0);
    let newest = job.path("run/checkpoints/step-00000005/rank-00000.safetensors");
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(newest)
        .unwrap();
    file.set_len(100).unwrap();
    let model = golden("llama_mha").display().to_string();
    let export = ["export", "--checkpoint", "run/checkpoints", "--out", "out"];
    let ran = job
        .run(&[&export[..], &["--model", &model]].concat())
        .exits(0);
    assert!(ran.stdout().contains("step 3 exported"), "{}", ran.stdout());
    ran.says(&["step-00000005", "incomplete"]);
    job.run(&["train", "job.yaml", "--resume"]).exits(0).says(&[
        "step-00000005",
        "damaged",
        "incomplete",
    ]);
    assert_eq!(job.metric("run", "step").len(), 5);
}

#[test]
fn metrics_that_are_gone_are_missed() {
    let job = Job::new();
    job.run(&["train", "job.yaml"]).exits(0);
    std::fs::remove_file(job.path("run/metrics.jsonl")).unwrap();
    job.run(&["train", "job.yaml", "--resume", "--set", "steps=6"])
        .exits(0)
        .says(&["metrics.jsonl", "lacks 5 of the steps"]);
}

/// A resumed run tells a skipped step once: as the run that was never stopped.
#[test]
fn a_skipped_step_is_told_once() {
    for engine in engines() {
        let job = Job::new();
        let line = |advantage: &str| {
            format!(r#"{{"prompt": [1, 2], "completion": [3, 4], "advantages": {advantage}}}"#)
        };
        let lines = [
            "1.0", "1.0", "1.0", "1.0", "1e300", "1e300", "1.0", "1.0", "1.0", "1.0",
        ];
        job.write("rl.jsonl", &lines.map(line).join("\n"));
        let train = |output: &str, steps: usize, more: &[&str]| {
            let sets = [
                format!("backend={engine}"),
                format!("output={output}"),
                format!("steps={steps}"),
                "data={train: rl.jsonl, shuffle: false}".to_owned(),
                "batch.global_batch_size=2".to_owned(),
                "objective.kind=ppo".to_owned(),
                "checkpoint.every=2".to_owned(),
            ];
            let sets: Vec<&str> = sets.iter().flat_map(|s| ["--set", s.as_str()]).collect();
            job.run(&[&["train", "job.yaml"][..], &sets, more].concat())
        };
        train("whole", 6, &[]).exits(0).says(&["skipped"]);
        let whole = job.metric("whole", "step");
        assert_eq!(whole, [1.0, 2.0, 2.0, 3.0, 4.0, 5.0, 6.0], "{engine}");
        train("parts", 3, &[]).exits(0);
        // As a kill before step 4 would have left it.
        std::fs::remove_dir_all(job.path("parts/checkpoints/step-00000003")).unwrap();
        train("parts", 6, &["--resume"]).exits(0);
        assert_eq!(job.metric("parts", "step"), whole, "{engine}");
        assert_eq!(job.metric("parts", "loss"), job.metric("whole", "loss"));
    }
}

/// A rate that throws every weight out of f32: neither saved nor exported, and the good checkpoint stays.
#[test]
fn weights_that_are_not_finite_are_neither_saved_nor_exported() {
    for engine in engines() {
        for every in ["null", "1"] {
            let job = Job::new();
            let backend = format!("backend={engine}");
            let checkpoints = format!("checkpoint={{every: {every}, keep: 1}}");
            let sets = ["--set", &backend, "--set", &checkpoints];
            let broken = ["--set", "optimizer={learning_rate: 3e38, weight_decay: 10}"];
            let train = [&["train", "job.yaml"][..], &sets].concat();
            job.run(&[&train[..], &broken, &["--set", "steps=1"]].concat())
                .exits(4)
                .says(&["a weight is not finite", "tensor = ", "step = 1"]);
            assert!(!job.path("run/model").exists(), "{engine}");
            if every == "null" {
                continue;
            }
            let left = std::fs::read_dir(job.path("run/checkpoints"))
                .unwrap()
                .count();
            assert_eq!(left, 0, "{engine}");
            job.run(&[&train[..], &["--set", "steps=2"]].concat())
                .exits(0);
            job.run(&[&train[..], &broken, &["--set", "steps=3", "--resume"]].concat())
                .exits(4)
                .says(&["step = 3"]);
            job.run(&[&train[..], &["--set", "steps=3", "--resume"]].concat())
                .exits(0);
            assert_eq!(job.metric("run", "step"), [1.0, 2.0, 3.0], "{engine}");
        }
    }
}

/// C14: other data, or another order of it, is refused before anything is written; the position would mean other
/// sequences.
#[test]
fn other_data_is_refused_before_anything_is_written() {
    let job = Job::new();
    job.run(&["train", "job.yaml"]).exits(0);
    let files = [
        "run/metrics.jsonl",
        "run/job.yaml",
        "run/checkpoints/step-00000005/manifest.json",
    ];
    let before = files.map(|name| job.text(name));
    let shorter: Vec<String> = job
        .text("data.jsonl")
        .lines()
        .skip(1)
        .map(str::to_owned)
        .collect();
    job.write("other.jsonl", &shorter.join("\n"));
    for (set, part) in [
        ("data.train=other.jsonl", "another data set"),
        ("data.shuffle=false", "another data set"),
        ("seed=9", "another order"),
    ] {
        let resume = [
            "train", "job.yaml", "--resume", "--set", "steps=9", "--set", set,
        ];
        job.run(&resume).exits(3).says(&[part, "help"]);
        assert_eq!(files.map(|name| job.text(name)), before, "{set}");
    }
    let left = std::fs::read_dir(job.path("run/checkpoints"))
        .unwrap()
        .count();
    assert_eq!(left, 2);
    job.run(&["train", "job.yaml", "--resume", "--set", "steps=9"])
        .exits(0);
}

/// Saves that go on beside the training: bit for bit the run that waits for each, and one that is stopped loses none.
#[test]
fn asynchronous_saves_change_nothing() {
    for engine in engines() {
        let job = Job::new();
        let backend = format!("backend={engine}");
        let beside = "checkpoint={every: 1, keep: 9, asynchronous: true}";
        let train = |output: &str, more: &[&str]| {
            let output = format!("output={output}");
            let sets = [
                "--set",
                &backend,
                "--set",
                "parallel.data_parallel_size=2",
                "--set",
                &output,
            ];
            job.run(&[&["train", "job.yaml"][..], &sets, more].concat())
                .exits(0)
        };
        train("waits", &["--set", "checkpoint.every=1"]);
        train("beside", &["--set", beside, "--set", "steps=3"]);
        train("beside", &["--set", beside, "--resume"]);
        assert_eq!(
            job.metric("waits", "loss"),
            job.metric("beside", "loss"),
            "{engine}"
        );
        for step in 1..=5 {
            for rank in 0..2 {
                let file = format!("checkpoints/step-{step:08}/rank-{rank:05}.safetensors");
                let of = |run: &str| std::fs::read(job.path(run).join(&file)).unwrap();
                assert!(of("waits") == of("beside"), "{engine}: {file}");
            }
        }
    }
}

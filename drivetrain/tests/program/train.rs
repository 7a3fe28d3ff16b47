use crate::support::{Job, bytes, engines};

/// Same engine and layout, stopped and resumed: bit for bit as if never stopped; another seed is another run.
#[test]
fn a_resumed_run_equals_an_uninterrupted_one() {
    for engine in engines() {
        let job = Job::new();
        let backend = format!("backend={engine}");
        let train = |more: &[&str]| {
            let mut arguments = vec!["train", "job.yaml", "--set", &backend];
            arguments.extend(more);
            job.run(&arguments).exits(0)
        };
        train(&["--set", "output=whole"]);
        train(&["--set", "output=parts", "--set", "steps=3"]);
        // The schedule is constant, so that a longer job is the same job.
        train(&["--set", "output=parts", "--resume"]);
        assert_eq!(job.metric("whole", "loss").len(), 5);
        assert_eq!(
            job.metric("whole", "loss"),
            job.metric("parts", "loss"),
            "{engine}"
        );
        let model = |run: &str| bytes(&job.path(run).join("model/model.safetensors"));
        assert_eq!(model("whole"), model("parts"), "{engine}");
        train(&["--set", "output=other", "--set", "seed=9"]);
        assert_ne!(
            job.metric("whole", "loss"),
            job.metric("other", "loss"),
            "{engine}"
        );
    }
}

/// A checkpoint of one engine at step 3 continues in another, on another number of ranks.
#[test]
fn a_checkpoint_continues_under_every_engine_and_layout() {
    let engines = engines();
    for &from in &engines {
        let job = Job::new();
        let backend = format!("backend={from}");
        job.run(&[
            "train",
            "job.yaml",
            "--set",
            &backend,
            "--set",
            "output=whole",
        ])
        .exits(0);
        let whole = job.metric("whole", "loss");
        for &to in &engines {
            for ranks in [1, 2] {
                let output = format!("{to}-{ranks}");
                let set = format!("output={output}");
                job.run(&[
                    "train", "job.yaml", "--set", &backend, "--set", &set, "--set", "steps=3",
                ])
                .exits(0);
                let (backend, ranks) = (
                    format!("backend={to}"),
                    format!("parallel.data_parallel_size={ranks}"),
                );
                job.run(&[
                    "train", "job.yaml", "--resume", "--set", &set, "--set", &backend, "--set",
                    &ranks,
                ])
                .exits(0);
                let continued = job.metric(&output, "loss");
                assert_eq!(continued.len(), 5, "{from} to {output}");
                for (a, b) in whole.iter().zip(&continued) {
                    // Losses near 5.5 in f32: 40 units of roundoff.
                    assert!(
                        (a - b).abs() <= 2e-5,
                        "{from} to {output}: {whole:?} {continued:?}"
                    );
                }
            }
        }
    }
}

/// C14 and the like: a run is never continued, nor its files replaced, unasked.
#[test]
fn another_runs_output_is_refused_before_anything_is_written() {
    let job = Job::new();
    job.run(&["train", "job.yaml"]).exits(0);
    let metrics = bytes(&job.path("run/metrics.jsonl"));
    job.run(&["train", "job.yaml"])
        .exits(3)
        .says(&["another run", "--resume", "run"]);
    assert_eq!(bytes(&job.path("run/metrics.jsonl")), metrics);
    let other = format!("model={}", crate::support::golden("qwen3_qknorm").display());
    job.run(&[
        "train", "job.yaml", "--resume", "--set", &other, "--set", "steps=9",
    ])
    .exits(3)
    .says(&["another model"]);
    assert_eq!(bytes(&job.path("run/metrics.jsonl")), metrics);
    job.run(&["train", "job.yaml", "--set", "output=new", "--resume"])
        .exits(3)
        .says(&["no complete checkpoint"]);
}

#[test]
fn validation_is_the_same_on_one_rank_and_two() {
    let job = Job::new();
    let lines = std::fs::read_to_string(job.path("data.jsonl")).unwrap();
    let seven: Vec<&str> = lines.lines().take(7).collect();
    job.write("validation.jsonl", &seven.join("\n"));
    let mut losses = Vec::new();
    for ranks in ["1", "2"] {
        let (output, ranks) = (
            format!("output=v{ranks}"),
            format!("parallel.data_parallel_size={ranks}"),
        );
        job.run(&[
            "train",
            "job.yaml",
            "--set",
            &output,
            "--set",
            &ranks,
            "--set",
            "steps=1",
            "--set",
            "data.validation=validation.jsonl",
            "--set",
            "validation.every=1",
        ])
        .exits(0);
        losses.push(job.metric(output.trim_start_matches("output="), "validation_loss")[0]);
    }
    assert!((losses[0] - losses[1]).abs() <= 2e-6, "{losses:?}");
    assert!(losses[0] > 1.0);
}

/// The saved config is the resolved one, and trains the same again.
#[test]
fn the_saved_job_is_what_ran() {
    let job = Job::new();
    job.run(&["train", "job.yaml", "--set", "optimizer.learning_rate=5e-4"])
        .exits(0);
    let saved = std::fs::read_to_string(job.path("run/job.yaml")).unwrap();
    assert!(
        saved.contains("0.0005") || saved.contains("5e-4"),
        "{saved}"
    );
    job.run(&["train", "run/job.yaml", "--set", "output=again"])
        .exits(0);
    assert_eq!(job.metric("run", "loss"), job.metric("again", "loss"));
}

#[test]
fn the_exported_model_trains_on() {
    let job = Job::new();
    job.run(&["train", "job.yaml"]).exits(0);
    let last = *job.metric("run", "loss").last().unwrap();
    job.run(&[
        "train",
        "job.yaml",
        "--set",
        "model=run/model",
        "--set",
        "output=on",
    ])
    .exits(0);
    assert!(job.metric("on", "loss")[0] < job.metric("run", "loss")[0]);
    assert!(last.is_finite());
    job.run(&[
        "export",
        "--checkpoint",
        "run/checkpoints",
        "--model",
        &crate::support::golden("llama_mha").display().to_string(),
        "--out",
        "exported",
    ])
    .exits(0);
    assert!(job.path("exported/config.json").exists());
}

/// The first Ctrl-C saves after the step in progress and ends with 0; the run then goes on.
#[test]
fn an_interrupt_saves_and_the_run_goes_on() {
    use std::process::{Command, Stdio};
    let job = Job::new();
    let child = Command::new(env!("CARGO_BIN_EXE_drivetrain"))
        .current_dir(job.path("."))
        .args([
            "train",
            "job.yaml",
            "--json",
            "--set",
            "steps=100000",
            "--set",
            "checkpoint.every=null",
        ])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let began = std::time::Instant::now();
    while std::fs::read_to_string(job.path("run/metrics.jsonl"))
        .unwrap_or_default()
        .lines()
        .count()
        < 3
    {
        assert!(began.elapsed().as_secs() < 60, "no step in a minute");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status()
        .unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let done = job.metric("run", "loss").len();
    let steps = format!("steps={}", done + 2);
    job.run(&["train", "job.yaml", "--resume", "--set", &steps])
        .exits(0);
    let steps = job.metric("run", "step");
    let expected: Vec<f64> = (1..=done + 2).map(|s| s as f64).collect();
    assert_eq!(steps, expected);
}

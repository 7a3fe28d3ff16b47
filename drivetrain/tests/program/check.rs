use crate::support::{Job, golden};

/// Five different faults: five reports, each with line, rule and remedy; exit 2.
#[test]
fn every_fault_is_reported_at_once() {
    let job = Job::new();
    let model = golden("llama_mha").display().to_string();
    job.write(
        "bad.yaml",
        &format!(
            "model: {model}\nbackend: megatorn\nsteps: many\noutput: run\ndata:\n  train: data.jsonl\nbatch:\n  \
             global_batch_size: 4\noptimizer:\n  learning-rate: 1e-3\n  beta1: 1.5\nobjective:\n  \
             temperature: 0\n"
        ),
    );
    let ran = job.run(&["check", "bad.yaml", "--json"]).exits(2);
    let result: serde_json::Value = serde_json::from_str(&ran.stdout()).unwrap();
    let found: Vec<(u64, String)> = result["diagnostics"]
        .as_array()
        .unwrap()
        .iter()
        .map(|d| {
            assert!(!d["remedy"].as_str().unwrap().is_empty(), "{d}");
            assert!(!d["rule"].as_str().unwrap().is_empty(), "{d}");
            (
                d["line"].as_u64().unwrap(),
                d["path"].as_str().unwrap().to_owned(),
            )
        })
        .collect();
    let expected = [
        (2, "backend"),
        (3, "steps"),
        (10, "optimizer.learning-rate"),
        (11, "optimizer.beta1"),
        (13, "objective.temperature"),
    ];
    assert_eq!(found, expected.map(|(line, path)| (line, path.to_owned())));
    job.run(&["check", "bad.yaml"])
        .exits(2)
        .says(&["megatron", "learning_rate", "line 13"]);
}

#[test]
fn a_sound_job_shows_its_plan() {
    let job = Job::new();
    let ran = job
        .run(&[
            "check",
            "job.yaml",
            "--set",
            "parallel.data_parallel_size=2",
            "--json",
        ])
        .exits(0);
    let result: serde_json::Value = serde_json::from_str(&ran.stdout()).unwrap();
    assert_eq!(result["plan"]["mesh"]["data_shard"], 2);
    assert!(!result["plan"]["parameters"].as_array().unwrap().is_empty());
    assert!(!result["plan"]["collectives"].as_array().unwrap().is_empty());
    assert!(!job.path("run").exists(), "check writes nothing");
}

/// A person reads a few lines: the run, its memory, and a row an operation, not one a layer.
#[test]
fn a_plan_is_summed_up() {
    let job = Job::new();
    let ranks = ["--set", "parallel.data_parallel_size=2"];
    let ran = job
        .run(&[&["check", "job.yaml"][..], &ranks].concat())
        .exits(0);
    let text = ran.stdout();
    assert!(text.contains("5 steps of 4 sequences, loss nll"), "{text}");
    assert!(
        text.contains("of moments") && text.contains("on a rank"),
        "{text}"
    );
    assert_eq!(text.matches("reduce_scatter").count(), 1, "{text}");
    assert!(text.lines().count() < 16, "{text}");
}

#[test]
fn doctor_lists_every_backend() {
    let ran = Job::new().run(&["doctor", "--json"]).exits(0);
    let result: serde_json::Value = serde_json::from_str(&ran.stdout()).unwrap();
    let names: Vec<&str> = result["backends"]
        .as_array()
        .unwrap()
        .iter()
        .map(|b| b["name"].as_str().unwrap())
        .collect();
    let mut expected = crate::support::engines();
    expected.push("reference");
    assert_eq!(names, expected);
    assert!(result["gemm_gflops_one_core"].as_f64().unwrap() > 0.1);
}

/// A mistyped relative path reads as a hub id: `check` asks no network, and names both readings.
#[test]
fn a_mistyped_model_path_never_goes_to_the_network() {
    use std::{net::TcpListener, time::Duration};

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let job = Job::new();
    let home = job.path("home");
    let variables = [
        ("HF_ENDPOINT", &*endpoint),
        ("HF_HOME", home.to_str().unwrap()),
    ];
    let arguments = ["check", "job.yaml", "--set", "model=models/tiny"];
    let folder = job.path("models/tiny").display().to_string();
    job.run_with(&arguments, &variables).exits(2).says(&[
        "MODEL-01",
        "cache does not hold",
        &folder,
    ]);
    std::thread::sleep(Duration::from_millis(10));
    assert!(listener.accept().is_err(), "the hub was asked");
}

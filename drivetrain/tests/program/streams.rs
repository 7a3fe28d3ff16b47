//! A stdout or stderr that is closed or full, and signals: no panic, nothing lost, nothing left behind.

use std::{
    fs::{File, OpenOptions},
    process::Stdio,
};

use crate::support::{Job, engines, golden};

/// A pipe that nobody reads.
fn closed() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

fn full() -> Stdio {
    let full: File = OpenOptions::new().write(true).open("/dev/full").unwrap();
    full.into()
}

#[test]
fn a_reader_that_leaves_is_no_fault() {
    let job = Job::new();
    let model = golden("llama_mha").display().to_string();
    let score = ["score", "--model", &model, "--backend", engines()[0]];
    let score = [&score[..], &["--data", "data.jsonl", "--out", "s.jsonl"]].concat();
    let cases: [(&[&str], i32); 7] = [
        (&["doctor"], 0),
        (&["doctor", "--json"], 0),
        (&["check", "job.yaml"], 0),
        (&["--help"], 0),
        (&score, 0),
        (&["conform", "--", "--list"], 3),
        (&["conform", "--", "refusals/"], 3),
    ];
    for (arguments, code) in cases {
        let ran = job
            .run_into(arguments, closed(), Stdio::piped())
            .exits(code);
        assert!(!ran.stderr().contains("error"), "{}", ran.stderr());
    }
    assert_eq!(job.text("s.jsonl").lines().count(), 12);
}

#[test]
fn a_full_stdout_is_one_error() {
    let job = Job::new();
    for arguments in [
        &["doctor"][..],
        &["check", "job.yaml", "--json"],
        &["conform", "--", "--list"],
    ] {
        let ran = job.run_into(arguments, full(), Stdio::piped()).exits(3);
        ran.says(&["standard output"]);
    }
}

#[test]
fn training_goes_on_without_readers() {
    let job = Job::new();
    let train = |output: &str, stdout: Stdio, stderr: Stdio| {
        let output = format!("output={output}");
        job.run_into(
            &["train", "job.yaml", "--json", "--set", &output],
            stdout,
            stderr,
        )
    };
    train("closed", closed(), closed()).exits(0);
    train("full", full(), full()).exits(3);
    train("full-stderr", Stdio::piped(), full()).exits(0);
    for run in ["closed", "full", "full-stderr"] {
        assert_eq!(job.metric(run, "loss").len(), 5, "{run}");
        assert!(job.path(run).join("model/model.safetensors").is_file());
    }
    job.run_into(&["check", "absent.yaml"], Stdio::piped(), full())
        .exits(2);
}

/// The second Ctrl-C waits for nothing and says nothing.
#[test]
fn a_second_interrupt_ends_at_once() {
    for engine in engines() {
        let job = Job::new();
        let backend = format!("backend={engine}");
        // Steps of many seconds.
        let slow = [
            "--set",
            "batch.global_batch_size=60000",
            "--set",
            "batch.micro_batch_size=64",
        ];
        let child = job.start(&[&["train", "job.yaml", "--set", &backend][..], &slow].concat());
        job.wait_for("run/job.yaml", |text| !text.is_empty());
        std::thread::sleep(std::time::Duration::from_millis(300));
        child.signal("-INT");
        std::thread::sleep(std::time::Duration::from_millis(300));
        let began = std::time::Instant::now();
        child.signal("-INT");
        let ran = child.ends().exits(4);
        assert!(began.elapsed().as_secs() < 2, "{engine}");
        let said = format!("{}{}", ran.stdout(), ran.stderr());
        assert!(
            !said.contains("error") && !said.contains("stopped after"),
            "{said}"
        );
    }
}

#[test]
fn an_interrupted_score_leaves_nothing() {
    let job = Job::new();
    let model = golden("llama_mha").display().to_string();
    let lines = job.text("data.jsonl");
    job.write("many.jsonl", &vec![lines; 5000].join("\n"));
    let score = ["score", "--model", &model, "--backend", engines()[0]];
    let child = job.start(
        &[
            &score[..],
            &["--data", "many.jsonl", "--out", "out/s.jsonl"],
        ]
        .concat(),
    );
    job.wait_for("out", |_| true);
    child.signal("-TERM");
    child.ends().exits(4).says(&["stopped as asked"]);
    assert_eq!(std::fs::read_dir(job.path("out")).unwrap().count(), 0);
}

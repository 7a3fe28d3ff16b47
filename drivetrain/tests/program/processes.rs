//! Ranks in processes: the same numbers as threads, and an end to all when one ends.

use std::{
    process::Command,
    time::{Duration, Instant},
};

use crate::support::{Job, bytes, engines};

const TWO: [&str; 2] = ["--set", "parallel.data_parallel_size=2"];

/// Engines that have data parallelism.
fn sharding() -> impl Iterator<Item = &'static str> {
    engines().into_iter().filter(|&name| name != "reference")
}

/// Process ids of a running program's ranks, by rank.
fn ranks_of(program: &str) -> Vec<String> {
    let began = Instant::now();
    loop {
        let found = Command::new("pgrep")
            .args(["-P", program])
            .output()
            .unwrap();
        let found = String::from_utf8(found.stdout).unwrap();
        let found: Vec<String> = found.lines().map(str::to_owned).collect();
        if found.len() == 2 {
            return found;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "{found:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Threads and processes add in the same order: models are equal bit for bit, also after a resume in processes of what
/// threads began.
#[test]
fn processes_compute_the_bits_of_threads() {
    for engine in sharding() {
        let job = Job::new();
        let backend = format!("backend={engine}");
        let train = |more: &[&str]| {
            let mut all = vec!["train", "job.yaml", "--set", &backend];
            all.extend(TWO);
            all.extend(more);
            job.run(&all).exits(0)
        };
        train(&["--set", "output=threads"]);
        let said = train(&["--set", "output=processes", "--nproc", "2"]);
        // Rank 0 speaks for all.
        assert_eq!(said.stdout().matches("last loss").count(), 1);
        train(&["--set", "output=mixed", "--set", "steps=3"]);
        train(&[
            "--set",
            "output=mixed",
            "--resume",
            "--nproc",
            "2",
            "--port=0",
        ]);
        let model = |run: &str| bytes(&job.path(run).join("model/model.safetensors"));
        for run in ["processes", "mixed"] {
            assert_eq!(model("threads"), model(run), "{engine} {run}");
            assert_eq!(
                job.metric("threads", "loss"),
                job.metric(run, "loss"),
                "{engine} {run}"
            );
        }
    }
}

/// A rank that is killed ends the others at once; one that is stopped, at the timeout. Its name is said.
#[test]
fn a_lost_rank_ends_all_and_is_named() {
    for engine in sharding() {
        for (signal, lost, seconds) in [("-KILL", 0, 5), ("-KILL", 1, 5), ("-STOP", 1, 9)] {
            let job = Job::new();
            let backend = format!("backend={engine}");
            let mut all = vec!["train", "job.yaml", "--nproc", "2", "--set", &backend];
            all.extend(TWO);
            all.extend(["--set", "steps=100000", "--set", "timeout_seconds=4"]);
            let running = job.start(&all);
            job.wait_for("run/metrics.jsonl", |text| text.lines().count() > 2);
            let ranks = ranks_of(&running.id());
            let kill = Command::new("kill").args([signal, &ranks[lost]]).status();
            assert!(kill.unwrap().success());
            let began = Instant::now();
            let missing = format!("missing = [{lost}]");
            let ran = running.ends().exits(4).says(&[&missing]);
            // And the grace of a rank that is stopped.
            let soon = Duration::from_secs(seconds + 5);
            assert!(began.elapsed() < soon, "{signal} {lost}: {}", ran.stderr());
        }
    }
}

/// Ctrl-C at the launcher stops all ranks after a step, with a checkpoint.
#[test]
fn an_interrupt_is_passed_on() {
    let job = Job::new();
    let mut all = vec!["train", "job.yaml", "--nproc", "2", "--set", "steps=100000"];
    all.extend(TWO);
    let running = job.start(&all);
    job.wait_for("run/metrics.jsonl", |text| text.lines().count() > 2);
    running.signal("-INT");
    let ran = running.ends().exits(0);
    assert!(ran.stdout().contains("continue with --resume"));
    assert!(job.path("run/checkpoints").is_dir());
}

#[test]
fn faults_are_said_once_and_name_the_place() {
    let job = Job::new();
    // A job of one rank.
    job.run(&["train", "job.yaml", "--nproc", "2"])
        .exits(2)
        .says(&["1 ranks (parallel)", "2 processes"]);
    let mut taken = vec!["train", "job.yaml", "--nproc", "2", "--port"];
    let listener = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    taken.push(&port);
    taken.extend(TWO);
    job.run(&taken).exits(4).says(&["is taken", &port]);
    job.run(&["train", "job.yaml", "--nproc", "0"]).exits(2);
    // The output of another run, of which only rank 0 knows.
    let mut again = vec!["train", "job.yaml"];
    again.extend(TWO);
    job.run(&again).exits(0);
    again.extend(["--nproc", "2"]);
    let ran = job
        .run(&again)
        .exits(3)
        .says(&["holds another run", "--overwrite"]);
    assert_eq!(ran.stderr().matches("help:").count(), 1, "{}", ran.stderr());
}

/// Scores of many ranks are those of one, in the order of the data.
#[test]
fn scores_of_processes() {
    let job = Job::new();
    let engine = sharding().next().unwrap();
    let score = |out: &str, more: &[&str]| {
        let mut all = vec!["score", "--model", "model", "--backend", engine];
        all.extend(["--data", "data.jsonl", "--out", out]);
        all.extend(more);
        job.run(&all).exits(0);
        job.text(out)
    };
    job.copy_model("model");
    let mut two = vec!["--nproc", "2"];
    two.extend(TWO);
    assert_eq!(score("threads.jsonl", &TWO), score("processes.jsonl", &two));
}

/// Where rank 0 keeps the store: it leaves last, and whoever ends early does not disturb the others.
#[test]
fn open_mpi_starts_ranks_too() {
    let job = Job::new();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    drop(listener);
    let mut all = vec!["train", "job.yaml", "--set", "output=mpi"];
    all.extend(TWO);
    let ranks = ["0", "1"].map(|rank| {
        let variables = [
            ("OMPI_COMM_WORLD_RANK", rank),
            ("OMPI_COMM_WORLD_LOCAL_RANK", rank),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("MASTER_PORT", &port),
        ];
        job.start_as(&all, &variables)
    });
    let [first, second] = ranks.map(|rank| rank.ends().exits(0));
    assert!(first.stdout().contains("last loss") && second.stdout().is_empty());
    let mut threads = vec!["train", "job.yaml", "--set", "output=threads"];
    threads.extend(TWO);
    job.run(&threads).exits(0);
    assert_eq!(job.metric("threads", "loss"), job.metric("mpi", "loss"));
}

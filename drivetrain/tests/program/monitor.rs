//! What a run tells of itself: TensorBoard's event files, memory by rank, and a timeline of chosen steps.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::support::{Job, engines};

fn events(job: &Job) -> Vec<Value> {
    let trace: Value = serde_json::from_str(&job.text("run/trace.json")).unwrap();
    trace["traceEvents"].as_array().unwrap().clone()
}

/// The slices of a rank's row as (name, begin, end); those of one thread lie within each other or apart.
fn slices(events: &[Value], rank: u64) -> Vec<(String, f64, f64)> {
    let mut slices: Vec<_> = (events.iter())
        .filter(|e| e["ph"] == "X" && e["pid"] == rank)
        .map(|e| {
            let (at, long) = (e["ts"].as_f64().unwrap(), e["dur"].as_f64().unwrap());
            (e["name"].as_str().unwrap().to_owned(), at, at + long)
        })
        .collect();
    // An outer one is closed after those within.
    slices.sort_by(|a, b| (a.1, -a.2).partial_cmp(&(b.1, -b.2)).unwrap());
    let mut open: Vec<f64> = Vec::new();
    for (name, begin, end) in &slices {
        open.retain(|outer| *outer > *begin);
        // A microsecond since 1970 has a quarter of one as its last bit.
        assert!(
            open.iter().all(|outer| *end <= outer + 2.0),
            "{name} ends after what it is in"
        );
        open.push(*end);
    }
    slices
}

#[test]
fn a_timeline_of_the_steps_that_were_asked_for() {
    for engine in engines() {
        let job = Job::new();
        let backend = format!("backend={engine}");
        let ranks = "parallel.data_parallel_size=2";
        let sets = ["--set", &backend, "--set", ranks, "--trace", "2,4-5"];
        job.run(&[&["train", "job.yaml"][..], &sets].concat())
            .exits(0);
        let events = events(&job);
        for rank in 0..2 {
            let slices = slices(&events, rank);
            let count = |name: &str| slices.iter().filter(|s| s.0 == name).count();
            let steps: Vec<&str> = (slices.iter())
                .map(|s| s.0.as_str())
                .filter(|name| name.starts_with("step "))
                .collect();
            assert_eq!(steps, ["step 2", "step 4", "step 5"], "{engine}");
            for phase in ["data", "forward_backward", "optim_step"] {
                assert_eq!(count(phase), 3, "{engine}: {phase}");
            }
            // Two layers, forward and backward, each step.
            for unit in [
                "block forward 0",
                "block forward 1",
                "block backward 0",
                "block backward 1",
            ] {
                assert_eq!(count(unit), 3, "{engine}: {unit}");
            }
            // All that a rank does in a chosen step is within it.
            for (name, begin, end) in &slices {
                let within = slices
                    .iter()
                    .any(|s| s.0.starts_with("step ") && s.1 <= *begin && *end <= s.2 + 2.0);
                assert!(within, "{engine}: {name}");
            }
            let counters: BTreeSet<&str> = (events.iter())
                .filter(|e| e["ph"] == "C" && e["pid"] == rank)
                .map(|e| e["name"].as_str().unwrap())
                .collect();
            assert_eq!(counters.len(), 2, "{counters:?}");
            // Every operation that begins ends, later, and says what it moved, in which group.
            let mut begun = BTreeMap::new();
            let mut ended = 0;
            for event in events
                .iter()
                .filter(|e| e["pid"] == rank && !e["id"].is_null())
            {
                let (id, at) = (event["id"].as_str().unwrap(), event["ts"].as_f64().unwrap());
                match event["ph"].as_str().unwrap() {
                    "b" => {
                        assert!(event["args"]["bytes"].is_u64() && event["args"]["ranks"] == 2);
                        assert!(begun.insert(id, (at, &event["name"])).is_none());
                    }
                    "e" => {
                        let (began, name) = begun[id];
                        assert!(began <= at && event["name"] == *name);
                        ended += 1;
                    }
                    other => panic!("{other}"),
                }
            }
            assert!(
                ended == begun.len() && ended > 10,
                "{engine}: {ended} of {}",
                begun.len()
            );
            let names: BTreeSet<&str> = begun.values().filter_map(|b| b.1.as_str()).collect();
            for part in ["all_gather", "reduce_scatter", "all_reduce world"] {
                assert!(
                    names.iter().any(|name| name.starts_with(part)),
                    "{engine}: {names:?}"
                );
            }
        }
    }
}

#[test]
fn a_run_that_is_not_asked_writes_no_timeline_and_is_the_same() {
    let job = Job::new();
    job.run(&["train", "job.yaml", "--trace", "1-5"]).exits(0);
    job.run(&["train", "job.yaml", "--set", "output=plain"])
        .exits(0);
    assert!(!job.path("plain/trace.json").exists() && !job.path("plain/tensorboard").exists());
    assert_eq!(job.metric("run", "loss"), job.metric("plain", "loss"));
    for steps in ["0", "5-2", "x", ""] {
        let given = format!("--trace={steps}");
        job.run(&["train", "job.yaml", &given])
            .exits(2)
            .says(&["--trace", "such as"]);
    }
}

#[test]
fn memory_is_told_by_rank() {
    for engine in engines() {
        let job = Job::new();
        let sets = [
            &format!("backend={engine}"),
            "metrics.memory=true",
            "parallel.data_parallel_size=2",
        ];
        let sets: Vec<&str> = sets.iter().flat_map(|s| ["--set", *s]).collect();
        job.run(&[&["train", "job.yaml"][..], &sets].concat())
            .exits(0);
        let text = job.text("run/metrics.jsonl");
        for line in text.lines() {
            let record: Value = serde_json::from_str(line).unwrap();
            let ranks = record["memory"].as_array().unwrap();
            assert_eq!(ranks.len(), 2, "{line}");
            for rank in ranks {
                for key in ["parameters", "optimizer", "resident"] {
                    assert!(rank[key].as_u64().unwrap() > 0, "{engine}: {key} in {line}");
                }
            }
        }
    }
}

/// What TensorBoard itself reads of the files, where this machine's Python has it.
const READ: &str = "
import sys, json
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator(sys.argv[1], size_guidance={'scalars': 0}).Reload()
print(json.dumps({tag: [[e.step, e.value] for e in found.Scalars(tag)] for tag in found.Tags()['scalars']}))
";

#[test]
fn tensorboard_reads_a_run_and_its_resumption() {
    let job = Job::new();
    let train = ["train", "job.yaml", "--set", "metrics.tensorboard=true"];
    job.run(&train).exits(0);
    // As a kill after step 3 leaves it: what came later is made again.
    std::fs::remove_dir_all(job.path("run/checkpoints/step-00000005")).unwrap();
    job.run(&[&train[..], &["--resume"]].concat()).exits(0);
    let folder = job.path("run/tensorboard");
    let files = std::fs::read_dir(&folder)
        .unwrap()
        .map(|e| e.unwrap().metadata().unwrap().len());
    let files: Vec<u64> = files.collect();
    assert!(
        files.len() == 2 && files.iter().all(|bytes| *bytes > 200),
        "{files:?}"
    );
    let python = std::process::Command::new("python3")
        .args(["-c", READ, folder.to_str().unwrap()])
        .output();
    let Some(python) = python.ok().filter(|ran| ran.status.success()) else {
        println!(
            "SKIPPED: no tensorboard in this machine's Python; core's tests read the files back"
        );
        return;
    };
    let found: Value = serde_json::from_slice(&python.stdout).unwrap();
    let losses: Vec<f32> = job
        .metric("run", "loss")
        .iter()
        .map(|l| *l as f32)
        .collect();
    let read = found["loss"].as_array().unwrap();
    let steps: Vec<u64> = read.iter().map(|e| e[0].as_u64().unwrap()).collect();
    assert_eq!(steps, [1, 2, 3, 4, 5]);
    let values: Vec<f32> = read.iter().map(|e| e[1].as_f64().unwrap() as f32).collect();
    assert_eq!(values, losses);
    for tag in [
        "grad_norm",
        "learning_rate",
        "tokens_per_second",
        "peak_memory",
    ] {
        assert_eq!(found[tag].as_array().unwrap().len(), 5, "{tag}");
    }
    // Another run in its place is alone there.
    job.run(&[&train[..], &["--overwrite"]].concat()).exits(0);
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
}

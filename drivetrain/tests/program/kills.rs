//! A job that is killed, or whose disk is full, at any moment of its saves: it loses nothing that it had saved, and
//! goes on as if nothing had been.

use std::{
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use crate::support::{Job, bytes, engines};

/// Numbers that repeat (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}

/// What a kill left of a save that was under way.
fn unfinished(store: &Path) -> bool {
    let entries = std::fs::read_dir(store).into_iter().flatten().flatten();
    entries
        .map(|e| e.file_name().into_string().unwrap())
        .any(|name| name.starts_with('.'))
}

/// The newest checkpoint's step, all of its checksums verified; every other one is complete as well.
fn newest(job: &Job) -> Option<u64> {
    let entries = std::fs::read_dir(job.path("run/checkpoints"))
        .into_iter()
        .flatten();
    let mut names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let ran = job.run(&["inspect", "run/checkpoints", "--verify", "--json"]);
    if !names.any(|name| name.starts_with("step-") || name.ends_with(".old")) {
        ran.exits(3);
        return None;
    }
    let report: serde_json::Value = serde_json::from_str(&ran.exits(0).stdout()).unwrap();
    assert_eq!(report["incomplete"], serde_json::json!([]), "{report}");
    report["newest"]["step"].as_u64()
}

/// Kills a job that saves after every step so many times, and holds what it became against one that nobody killed.
fn survives(engine: &str, asynchronous: bool, kills: u32, seed: u64) {
    let job = Job::new();
    let sets = [
        format!("backend={engine}"),
        format!("checkpoint={{every: 1, keep: 2, asynchronous: {asynchronous}}}"),
        "parallel.data_parallel_size=2".to_owned(),
    ];
    let sets: Vec<&str> = sets.iter().flat_map(|s| ["--set", s.as_str()]).collect();
    let train = [&["train", "job.yaml"][..], &sets].concat();
    let endless = [&train[..], &["--set", "steps=1000000"]].concat();
    let mut random = Random(seed);
    let (mut last, mut during_a_save) = (None, 0);
    for _ in 0..kills {
        let resume = if last.is_some() {
            &["--resume"][..]
        } else {
            &[]
        };
        let before = job
            .path("run/metrics.jsonl")
            .exists()
            .then(|| bytes(&job.path("run/metrics.jsonl")));
        let child = job.start(&[&endless[..], resume].concat());
        // From when it takes steps on, some of it.
        let began = Instant::now();
        while std::fs::read(job.path("run/metrics.jsonl"))
            .ok()
            .filter(|b| !b.is_empty())
            == before
            && began.elapsed() < Duration::from_secs(5)
        {
            std::thread::sleep(Duration::from_millis(2));
        }
        std::thread::sleep(Duration::from_micros(random.below(120_000)));
        child.kill("-KILL");
        during_a_save += u32::from(unfinished(&job.path("run/checkpoints")));
        let found = newest(&job);
        assert!(
            found >= last,
            "seed {seed}: step {found:?} is left of {last:?}"
        );
        last = found;
    }
    println!(
        "{engine}, asynchronous {asynchronous}: {kills} kills, {during_a_save} in a save, step {last:?}"
    );
    assert!(
        kills < 20 || during_a_save > kills / 10,
        "{during_a_save} of {kills} kills"
    );
    let steps = format!("steps={}", last.unwrap_or(0) + 3);
    let resume = if last.is_some() {
        &["--resume"][..]
    } else {
        &[]
    };
    job.run(&[&train[..], &["--set", &steps], resume].concat())
        .exits(0);
    job.run(&[&train[..], &["--set", &steps, "--set", "output=whole"]].concat())
        .exits(0);
    for key in ["step", "loss", "grad_norm"] {
        assert_eq!(
            job.metric("run", key),
            job.metric("whole", key),
            "seed {seed}: {key}"
        );
    }
    let model = |run: &str| bytes(&job.path(run).join("model/model.safetensors"));
    assert_eq!(model("run"), model("whole"), "seed {seed}");
    assert!(!unfinished(&job.path("run/checkpoints")));
}

/// A handful of each.
#[test]
fn a_killed_job_goes_on_from_its_last_save() {
    for engine in engines() {
        for (asynchronous, seed) in [(false, 1), (true, 2)] {
            survives(engine, asynchronous, 3, seed);
        }
    }
}

#[test]
#[ignore = "minutes: `cargo xtask test --all`"]
fn a_hundred_kills() {
    let engines = engines();
    let share = 100u32.div_ceil(2 * engines.len() as u32);
    for engine in engines {
        for (asynchronous, seed) in [(false, 11), (true, 12)] {
            survives(engine, asynchronous, share, seed);
        }
    }
}

/// Runs the program under a shell that allows files of so many KiB: a longer write fails as on a full disk.
fn limited(job: &Job, kibibytes: u64, arguments: &[&str]) -> crate::support::Ran {
    // Ignored, so that the write fails and the process lives.
    let script = format!("trap '' XFSZ; ulimit -f {kibibytes}; exec \"$0\" \"$@\"");
    let program = env!("CARGO_BIN_EXE_drivetrain");
    let shell = ["-c", script.as_str(), program];
    job.run_program(Path::new("bash"), &[&shell[..], arguments].concat(), &[])
}

/// A checkpoint is three times its model: files of a size between the two can be written, checkpoints cannot.
#[test]
fn a_full_disk_loses_no_checkpoint() {
    for engine in engines() {
        for asynchronous in [false, true] {
            let job = Job::new();
            let sets = [
                format!("backend={engine}"),
                format!("checkpoint={{every: 1, asynchronous: {asynchronous}}}"),
            ];
            let sets: Vec<&str> = sets.iter().flat_map(|s| ["--set", s.as_str()]).collect();
            let train = [&["train", "job.yaml"][..], &sets].concat();
            job.run(&[&train[..], &["--set", "steps=2"]].concat())
                .exits(0);
            let before = newest(&job);
            assert_eq!(before, Some(2));
            let more = ["--resume", "--set", "steps=9"];
            // Told once, tried again, and then the end.
            limited(&job, 600, &[&train[..], &more].concat())
                .exits(3)
                .says(&[
                    "step 3: the checkpoint was NOT saved",
                    ".step-00000003.tmp",
                    ".step-00000004.tmp",
                    "checkpoint = step 4",
                    "free space there",
                ]);
            let metrics = job.text("run/metrics.jsonl");
            assert!(metrics.contains("\"checkpoint_failed\""), "{metrics}");
            assert_eq!(newest(&job), before);
            assert!(
                !unfinished(&job.path("run/checkpoints")),
                "{engine} {asynchronous}"
            );
            job.run(&[&train[..], &more].concat()).exits(0);
            job.run(&[&train[..], &["--set", "steps=9", "--set", "output=whole"]].concat())
                .exits(0);
            assert_eq!(job.metric("run", "loss"), job.metric("whole", "loss"));
            let model = |run: &str| bytes(&job.path(run).join("model/model.safetensors"));
            assert_eq!(model("run"), model("whole"));
        }
    }
}

/// The same on a file system that is really full, where one can be mounted.
#[test]
fn a_full_file_system_loses_no_checkpoint() {
    let job = Job::new();
    let place = job.path("small");
    std::fs::create_dir(&place).unwrap();
    // The model (0.4 MiB) and three checkpoints of three times that.
    let mount = ["-t", "tmpfs", "-o", "size=4500k", "none"];
    let mounted = Command::new("mount").args(mount).arg(&place).output();
    if !mounted.is_ok_and(|ran| ran.status.success()) {
        println!(
            "SKIPPED: no tmpfs can be mounted here; RLIMIT_FSIZE stands for it in the test before"
        );
        return;
    }
    let train = ["train", "job.yaml", "--set", "output=small/run", "--set"];
    let checkpoint = "checkpoint={every: 1, keep: 9, asynchronous: true}";
    let train = [&train[..], &[checkpoint, "--set", "steps=9"]].concat();
    let ran = job.run(&train);
    let inspected = job.run(&["inspect", "small/run/checkpoints", "--verify", "--json"]);
    let fewer = "checkpoint={every: 1, keep: 1}";
    for step in ["step-00000001", "step-00000002"] {
        // Room, as a person would make it.
        let _ = std::fs::remove_dir_all(place.join("run/checkpoints").join(step));
    }
    let resumed = job.run(&[&train[..], &["--resume", "--set", fewer]].concat());
    let loss = job.metric("small/run", "loss");
    assert!(
        Command::new("umount")
            .arg(&place)
            .status()
            .unwrap()
            .success()
    );
    ran.exits(3).says(&["NOT saved", "No space left"]);
    let report: serde_json::Value = serde_json::from_str(&inspected.exits(0).stdout()).unwrap();
    assert_eq!(report["incomplete"], serde_json::json!([]), "{report}");
    assert!(report["newest"]["step"].as_u64() >= Some(2), "{report}");
    resumed.exits(0);
    job.run(&[
        "train",
        "job.yaml",
        "--set",
        "output=whole",
        "--set",
        "steps=9",
    ])
    .exits(0);
    assert_eq!(loss, job.metric("whole", "loss"));
}

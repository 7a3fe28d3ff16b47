use serde_json::Value;

use crate::support::{Job, engines, golden};

/// What `compare --json` says of a job, which it finds in agreement.
fn compared(job: &Job, backends: &str, steps: &str, more: &[&str]) -> Value {
    let compare = [
        "compare",
        "job.yaml",
        "--json",
        "--backends",
        backends,
        "--steps",
        steps,
    ];
    let ran = job.run(&[&compare[..], more].concat()).exits(0);
    serde_json::from_str(&ran.stdout()).unwrap()
}

/// Bounds and truth are the engines' own, wherever they stand in the list.
#[test]
fn the_order_of_engines_changes_no_verdict() {
    let job = Job::new();
    let backends = format!("reference,{}", engines().join(","));
    let result = compared(&job, &backends, "1", &[]);
    assert_eq!(result["runs"][0]["exact"], true);
    assert_eq!(result["runs"][0]["compute"], "f64");
    assert_eq!(result["parity"].as_array().unwrap().len(), engines().len());
    for (run, parity) in engines().iter().zip(result["parity"].as_array().unwrap()) {
        assert_eq!(parity["backend"], **run);
        assert_eq!(parity["truth"], "reference");
        // An f32 engine's bound is f32's, not the oracle's.
        let tolerance = parity["log_probs"]["tolerance"].as_f64().unwrap();
        assert!((1e-7..1e-3).contains(&tolerance), "{tolerance}");
    }
}

#[test]
fn engines_agree_and_the_report_says_so() {
    let job = Job::new();
    let backends = engines()
        .into_iter()
        .chain(["reference"])
        .collect::<Vec<_>>()
        .join(",");
    let result = compared(&job, &backends, "4", &[]);
    assert_eq!(result["parity"].as_array().unwrap().len(), engines().len());
    for run in result["runs"].as_array().unwrap() {
        assert_eq!(run["losses"].as_array().unwrap().len(), 4);
        assert!(run["step_seconds"].as_f64().unwrap() > 0.0);
    }
    for parity in result["parity"].as_array().unwrap() {
        assert_eq!(parity["truth"], "reference");
        for quantity in ["log_probs", "gradient", "weights"] {
            let share = parity[quantity]["share"].as_f64().unwrap();
            assert!(share > 0.0 && share <= 1.0, "{quantity}: {share}");
        }
    }
    let page = std::fs::read_to_string(job.path("run/compare.html")).unwrap();
    assert!(page.contains("The engines agree") && page.matches("<svg").count() == 2);
}

/// An engine that decays 1-D parameters against the job's word disagrees, and is named.
#[test]
fn a_defect_is_a_disagreement() {
    use std::sync::Arc;

    use drivetrain::{
        backend,
        core::{
            config::{JobSource, load_job},
            model::LocalModels,
        },
        run::{CompareOptions, compare},
    };

    let job = Job::new();
    let backend = backend("reference").unwrap();
    let load = |decay_1d: bool| {
        let overrides = [
            "backend=reference".to_owned(),
            "precision.compute=f64".to_owned(),
            format!("optimizer.decay_1d={decay_1d}"),
        ];
        let source = JobSource::read(&job.path("job.yaml")).unwrap();
        load_job(&source, &overrides, &[&*backend], &LocalModels).unwrap()
    };
    let run = |second: bool| {
        let jobs = [
            (load(false), Arc::clone(&backend)),
            (load(second), Arc::clone(&backend)),
        ];
        compare(&jobs, &CompareOptions { steps: 2 }, &|_, _, _| {}).unwrap()
    };
    let same = run(false);
    assert!(same.agrees() && same.parity.len() == 1, "{:?}", same.parity);
    let other = run(true);
    assert!(!other.agrees());
    assert!(other.parity[0].log_probs.passed() && other.parity[0].gradient.passed());
    assert!(!other.parity[0].weights.passed());
    assert!(
        other.parity[0].weights.of.contains("norm"),
        "{}",
        other.parity[0].weights.of
    );
}

/// Columns that the trainer would compute are computed here too, by each engine under its own weights.
#[test]
fn losses_of_reinforcement_learning_are_compared_on_data_without_log_probs() {
    let job = Job::new();
    let answers = |i: usize| [1 + i, 40 + 3 * i, 7, 90 + i];
    let pair = |i: usize| {
        let (chosen, rejected) = (answers(i), answers(i + 50));
        format!(r#"{{"prompt": [1, {i}, 5], "chosen": {chosen:?}, "rejected": {rejected:?}}}"#)
    };
    let rollout = |i: usize| {
        let (group, reward) = (i / 4, i % 3);
        let answer = answers(i);
        format!(
            r#"{{"prompt": [1, 2], "completion": {answer:?}, "group": {group}, "rewards": {reward}}}"#
        )
    };
    job.write(
        "dpo.jsonl",
        &(0..8).map(pair).collect::<Vec<_>>().join("\n"),
    );
    job.write(
        "grpo.jsonl",
        &(0..16).map(rollout).collect::<Vec<_>>().join("\n"),
    );
    let backends = format!("{},reference", engines().join(","));
    for (kind, more) in [
        ("dpo", "objective.beta=0.1"),
        ("grpo", "objective.kl_coefficient=0.1"),
    ] {
        let sets = [
            format!("data.train={kind}.jsonl"),
            format!("objective.kind={kind}"),
            more.to_owned(),
            "batch.global_batch_size=8".to_owned(),
            // Weights of tiny gradients move by the whole rate this way or that, and the next step's gradients with
            // them: at a high rate no bound knows how far.
            "optimizer.learning_rate=1e-4".to_owned(),
            "parallel.data_parallel_size=2".to_owned(),
        ];
        let sets: Vec<&str> = sets.iter().flat_map(|s| ["--set", s.as_str()]).collect();
        let result = compared(&job, &backends, "2", &sets);
        assert_eq!(
            result["parity"].as_array().unwrap().len(),
            engines().len(),
            "{kind}"
        );
        for run in result["runs"].as_array().unwrap() {
            assert!(
                run["grad_norms"][0].as_f64().unwrap() > 0.0,
                "{kind}: {run}"
            );
        }
    }
}

/// What is measured is the engine's own: evidence of another engine and of the other ranks is not in it.
#[test]
fn the_measured_memory_is_the_engines() {
    let job = Job::new();
    let model = job.path("wide");
    std::fs::create_dir(&model).unwrap();
    let config = std::fs::read_to_string(golden("llama_mha").join("config.json")).unwrap();
    let wide = config.replace("\"vocab_size\": 256", "\"vocab_size\": 40000");
    assert_ne!(wide, config);
    job.write("wide/config.json", &wide);
    let sets = ["--set", "model=wide", "--set", "from_scratch=true"];
    let ranks = [
        "parallel.data_parallel_size=2",
        "steps=1",
        "checkpoint.every=null",
    ];
    let ranks: Vec<&str> = ranks.iter().flat_map(|s| ["--set", s]).collect();
    let peak = |arguments: &[&str]| {
        let ran = job.run(&[arguments, &sets, &ranks].concat()).exits(0);
        let line = ran.stdout().lines().next().unwrap().to_owned();
        serde_json::from_str::<serde_json::Value>(&line).unwrap()
    };
    for engine in engines() {
        let backend = format!("backend={engine}");
        let trained = peak(&[
            "train",
            "job.yaml",
            "--json",
            "--overwrite",
            "--set",
            &backend,
        ]);
        let trained = trained["peak_memory"].as_u64().unwrap();
        let others: Vec<&str> = engines().into_iter().filter(|e| *e != engine).collect();
        let backends = [&[engine][..], &others].concat().join(",");
        let compare = [
            "compare",
            "job.yaml",
            "--json",
            "--steps",
            "2",
            "--backends",
            &backends,
        ];
        let compared = peak(&compare);
        let compared = compared["runs"][0]["peak_memory"].as_u64().unwrap();
        assert!(
            compared <= trained + trained / 4,
            "{engine}: {compared} {trained}"
        );
    }
}

/// A load balanced over micro-batches depends on the cut, so engines that cut differently are both right and differ.
#[test]
fn engines_that_cut_the_batch_differently_are_not_judged_by_each_other() {
    let job = Job::new();
    let backends = format!("{},reference", engines()[0]);
    let model = format!("model={}", golden("mixtral_moe").display());
    let compare = |more: &[&str]| {
        let sets = [
            model.as_str(),
            "moe.load_balancing=global",
            "moe.load_balancing_coefficient=0.1",
            "parallel.data_parallel_size=2",
        ];
        let sets = sets.iter().chain(more).flat_map(|set| ["--set", set]);
        let compare = [
            "compare",
            "job.yaml",
            "--steps",
            "1",
            "--backends",
            &backends,
        ];
        job.run(&compare.into_iter().chain(sets).collect::<Vec<_>>())
    };
    compare(&["batch.micro_batch_size=1"]).exits(2).says(&[
        "moe.load_balancing",
        "over 2 data-parallel ranks",
        "reference over 1 data-parallel ranks",
        "help: compare with",
    ]);
    compare(&[]).exits(0);
}

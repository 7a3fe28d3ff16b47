use crate::support::{Job, engines};

/// Bounds and truth are the engines' own, wherever they stand in the list.
#[test]
fn the_order_of_engines_changes_no_verdict() {
    let job = Job::new();
    let backends = format!("reference,{}", engines().join(","));
    let ran = job
        .run(&[
            "compare",
            "job.yaml",
            "--backends",
            &backends,
            "--steps",
            "1",
            "--json",
        ])
        .exits(0);
    let result: serde_json::Value = serde_json::from_str(&ran.stdout()).unwrap();
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
    let ran = job
        .run(&[
            "compare",
            "job.yaml",
            "--backends",
            &backends,
            "--steps",
            "4",
            "--json",
        ])
        .exits(0);
    let result: serde_json::Value = serde_json::from_str(&ran.stdout()).unwrap();
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

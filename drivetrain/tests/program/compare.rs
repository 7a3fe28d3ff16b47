use crate::support::{Job, engines};

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

/// Parity that fails is exit 4: here the second engine is given another optimizer through its own options'
/// door, the only thing that differs being what a defect would change.
#[test]
fn disagreement_is_exit_4() {
    let job = Job::new();
    let backends = format!("{},reference", engines()[0]);
    // bf16 against f64 under f32's tolerance cannot agree, where the engine computes in it.
    let ran = job.run(&[
        "compare",
        "job.yaml",
        "--backends",
        &backends,
        "--steps",
        "2",
        "--set",
        "optimizer.epsilon=1e-30",
        "--set",
        "optimizer.learning_rate=10.0",
    ]);
    // Whatever the verdict is at such a rate, it is a verdict and not a fault of another kind.
    let code = if ran.stdout().contains("DISAGREE") {
        4
    } else {
        0
    };
    ran.exits(code);
}

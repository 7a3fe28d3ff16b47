use crate::support::{Job, engines, golden};

fn scores(job: &Job, file: &str) -> Vec<(Vec<f64>, Vec<f64>)> {
    let text = std::fs::read_to_string(job.path(file)).unwrap();
    text.lines()
        .map(|line| {
            let value: serde_json::Value = serde_json::from_str(line).unwrap();
            let numbers = |key: &str| {
                value[key]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|v| v.as_f64().unwrap())
                    .collect()
            };
            (numbers("log_probs"), numbers("entropy"))
        })
        .collect()
}

/// A line a sequence in the file's order, whatever the engine, the ranks and the batch size.
#[test]
fn scores_are_the_same_under_every_engine_and_cut() {
    let job = Job::new();
    let model = golden("mistral_swa8").display().to_string();
    let mut all = Vec::new();
    for engine in engines().into_iter().chain(["reference"]) {
        for (ranks, batch) in [("1", "8"), ("2", "5")] {
            if engine == "reference" && ranks == "2" {
                continue;
            }
            let ranks = format!("parallel.data_parallel_size={ranks}");
            let mut arguments = vec![
                "score",
                "--model",
                &model,
                "--backend",
                engine,
                "--data",
                "data.jsonl",
                "--out",
                "scores.jsonl",
                "--batch-size",
                batch,
                "--set",
                &ranks,
            ];
            if engine == "reference" {
                arguments.extend(["--set", "precision.compute=f64"]);
            }
            job.run(&arguments).exits(0);
            all.push(scores(&job, "scores.jsonl"));
        }
    }
    let truth = all.last().unwrap().clone();
    assert_eq!(truth.len(), 12);
    for one in &all {
        assert_eq!(one.len(), truth.len());
        for ((a, ae), (b, be)) in one.iter().zip(&truth) {
            assert_eq!((a.len(), ae.len()), (b.len(), be.len()));
            assert_eq!((a[0], ae[0]), (0.0, 0.0));
            for (x, y) in a.iter().zip(b).chain(ae.iter().zip(be)) {
                assert!((x - y).abs() <= 2e-5, "{x} {y}");
            }
        }
    }
    let lengths: Vec<usize> = truth.iter().map(|t| t.0.len()).collect();
    assert_eq!(
        lengths,
        (0..12).map(|i| 3 + (i * 7) % 18).collect::<Vec<_>>()
    );
}

#[test]
fn temperature_divides_the_logits_of_both() {
    let job = Job::new();
    let model = golden("llama_mha").display().to_string();
    let run = |temperature: &str, out: &str| {
        job.run(&[
            "score",
            "--model",
            &model,
            "--backend",
            engines()[0],
            "--data",
            "data.jsonl",
            "--out",
            out,
            "--temperature",
            temperature,
        ])
    };
    run("1", "one.jsonl").exits(0);
    run("100000", "hot.jsonl").exits(0);
    // At a huge temperature every distribution is uniform over 256.
    let uniform = 256f64.ln();
    for (log_probs, entropy) in scores(&job, "hot.jsonl") {
        assert!(log_probs[1..].iter().all(|l| (l + uniform).abs() < 1e-3));
        assert!(entropy[1..].iter().all(|h| (h - uniform).abs() < 1e-3));
    }
    run("0", "zero.jsonl").exits(2).says(&["temperature"]);
    assert!(!job.path("zero.jsonl").exists());
}

/// R04: as many rows as there are sequences, whatever the ranks: an uneven last batch, and more ranks than sequences.
#[test]
fn sequences_that_do_not_divide_over_the_ranks() {
    let job = Job::new();
    let data = job.text("data.jsonl");
    let model = golden("llama_mha").display().to_string();
    for (lines, batch) in [(7, "5"), (3, "4"), (1, "8")] {
        let some: Vec<&str> = data.lines().take(lines).collect();
        job.write("some.jsonl", &some.join("\n"));
        let run = |engine: &str, ranks: &str| {
            let sets = format!("parallel.data_parallel_size={ranks}");
            let arguments = [
                "score",
                "--model",
                &model,
                "--backend",
                engine,
                "--batch-size",
                batch,
            ];
            let files = [
                "--data",
                "some.jsonl",
                "--out",
                "scores.jsonl",
                "--set",
                &sets,
            ];
            job.run(&[&arguments[..], &files].concat()).exits(0);
            scores(&job, "scores.jsonl")
        };
        for engine in engines() {
            let alone = run(engine, "1");
            assert_eq!(alone.len(), lines);
            for ranks in ["2", "4"] {
                let spread = run(engine, ranks);
                assert_eq!(spread.len(), lines, "{engine} on {ranks} ranks");
                for ((a, ae), (b, be)) in spread.iter().zip(&alone) {
                    assert_eq!((a.len(), ae.len()), (b.len(), be.len()));
                    for (x, y) in a.iter().zip(b).chain(ae.iter().zip(be)) {
                        assert!((x - y).abs() <= 2e-5, "{engine} on {ranks} ranks: {x} {y}");
                    }
                }
            }
        }
    }
}

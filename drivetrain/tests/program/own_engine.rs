use std::path::Path;

use crate::support::{Job, golden};

/// Every command of the program, under an engine that this crate does not know: `examples/own_engine.rs`.
#[test]
fn the_program_trains_and_proves_a_strangers_engine() {
    let program = Path::new(env!("CARGO_BIN_EXE_drivetrain")).with_file_name("examples");
    let program = program.join(format!("own_engine{}", std::env::consts::EXE_SUFFIX));
    assert!(
        program.is_file(),
        "no {}: `cargo build --examples` makes it",
        program.display()
    );
    let job = Job::new();
    std::fs::create_dir(job.path("model")).unwrap();
    let config = std::fs::read_to_string(golden("llama_mha").join("config.json")).unwrap();
    let flat = config.replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 0");
    assert_ne!(flat, config);
    job.write("model/config.json", &flat);
    job.write(
        "bigram.yaml",
        "model: model\nfrom_scratch: true\nbackend: bigram\nsteps: 30\noutput: run\ndata:\n  train: \
         data.jsonl\nbatch:\n  global_batch_size: 4\noptimizer:\n  learning_rate: 3e-2\n",
    );
    let run = |arguments: &[&str]| job.run_program(&program, arguments, &[]);

    let ran = run(&["doctor", "--json"]).exits(0);
    let report: serde_json::Value = serde_json::from_str(&ran.stdout()).unwrap();
    assert_eq!(report["backends"].as_array().unwrap().len(), 1);
    assert_eq!(report["backends"][0]["name"], "bigram");

    run(&["check", "bigram.yaml"]).exits(0);
    run(&["check", "bigram.yaml", "--set", "backend=megatron"])
        .exits(2)
        .says(&["CFG-04", "choose one of bigram"]);
    run(&["train", "bigram.yaml"]).exits(0);
    let losses = job.metric("run", "loss");
    let worst = losses[27..].iter().fold(0.0f64, |m, &l| m.max(l));
    assert!(losses.len() == 30 && worst < losses[0], "{losses:?}");
    assert!(job.path("run/model/model.safetensors").is_file());
    run(&["compare", "bigram.yaml", "--steps", "2"]).exits(0);
    let ran = run(&["conform", "--", "refusals/"]).exits(0);
    assert!(ran.stdout().contains("ok"), "{}", ran.stdout());
}

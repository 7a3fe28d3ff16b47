//! Every rule fires at least once; random text never panics; random jobs survive a round trip.

use proptest::prelude::*;

use super::*;

/// A job a rule, and the rule it breaks, so that no row of the tables is dead.
const BREAKING: [(&str, &str); 54] = [
    (
        "batch.global_batch_size=3 parallel.data_parallel_size=4",
        "BATCH-01",
    ),
    ("batch.micro_batch_size=9", "BATCH-02"),
    (
        "batch.micro_batch_size=1 batch.micro_batch_tokens=64",
        "BATCH-03",
    ),
    ("batch.micro_batch_tokens=63", "BATCH-04"),
    ("parallel.data_parallel_size=3", "BATCH-05"),
    ("parallel.world_size=2", "MESH-01"),
    (
        "parallel.data_parallel_size=4 parallel.data_replicate_size=3",
        "DP-02",
    ),
    ("parallel.tensor_parallel_size=3", "TP-02"),
    ("parallel.tensor_parallel_size=3", "TP-03"),
    ("backend=wide parallel.tensor_parallel_size=4", "TP-03"),
    ("parallel.tensor_parallel_size=5", "TP-04"),
    ("parallel.sequence_parallel=true", "TP-05"),
    ("parallel.pipeline_parallel_size=3", "PP-02"),
    ("parallel.first_stage_layers=1", "PP-03"),
    ("parallel.virtual_pipeline_size=2", "PP-04"),
    ("parallel.expert_parallel_size=2", "EP-02"),
    ("model=moe parallel.expert_parallel_size=3", "EP-03"),
    ("parallel.expert_parallel_size=2", "EP-04"),
    ("model=moe parallel.expert_tensor_parallel_size=5", "EP-05"),
    ("model=moe", "FAMILY-01"),
    ("model=balanced", "MOE-01"),
    ("model=moe moe.bias_update_rate=0.1", "MOE-01"),
    ("moe.z_loss_coefficient=0.1", "MOE-02"),
    ("model=moe moe.z_loss_coefficient=-1", "MOE-03"),
    ("model=moe moe.load_balancing=sequence", "MOE-04"),
    ("precision.compute=bf16", "DTYPE-01"),
    ("precision.reduce=f16", "DTYPE-02"),
    ("precision.reduce=u8", "DTYPE-03"),
    ("precision.export=i64", "DTYPE-04"),
    ("precision.reduce=bf16", "DTYPE-05"),
    ("precision.saved_activations=bf16", "DTYPE-06"),
    ("device=cuda", "DEV-01"),
    ("parallel.data_parallel_size=8", "DP-01"),
    (
        "parallel.data_parallel_size=2 parallel.data_replicate_size=2",
        "DP-03",
    ),
    ("parallel.tensor_parallel_size=2", "TP-01"),
    ("parallel.pipeline_parallel_size=2", "PP-01"),
    ("parallel.context_parallel_size=2", "CP-01"),
    ("parallel.expert_parallel_size=2", "EP-01"),
    ("recompute.full_layers=1", "RC-01"),
    ("recompute.modules=[moe_activation]", "RC-02"),
    ("optimizer.beta2=1", "OPT-01"),
    ("optimizer.max_grad_norm=0", "OPT-02"),
    ("optimizer.learning_rate=1", "OPT-03"),
    ("schedule.warmup_steps=11", "LR-01"),
    ("schedule.min_ratio=2", "LR-02"),
    ("schedule.decay_steps=2", "LR-03"),
    ("objective.temperature=-1", "OBJ-01"),
    ("objective.temperature=1e-300", "OBJ-01"),
    ("objective.temperature=1e39", "OBJ-01"),
    ("objective.beta=0.1", "OBJ-02"),
    ("objective.divisor=2", "OBJ-03"),
    ("objective.kind=ppo objective.clip_low=2", "OBJ-04"),
    ("objective.kind=ppo objective.kl_estimator=k3", "OBJ-05"),
    ("objective.kind=dpo", "OBJ-06"),
];

const BREAKING_RUN: [(&str, &str); 10] = [
    ("data.max_length=65", "DATA-01"),
    ("data.train=nowhere.jsonl", "DATA-02"),
    ("validation.every=5", "DATA-03"),
    ("output=model/config.json/out", "OUT-01"),
    ("output=model", "OUT-02"),
    ("timeout_seconds=1e9", "TIME-01"),
    ("model=wordy logits_budget_bytes=65536", "LOGITS-01"),
    ("backend=wide checkpoint.every=2", "CKPT-01"),
    ("checkpoint.every=11", "CKPT-02"),
    ("checkpoint.when_busy=skip", "CKPT-03"),
];

#[test]
fn every_rule_of_the_tables_fires() {
    let desk = Desk::new();
    let folder = |name: &str| desk.0.path().join(name);
    let moe = MODEL
        .replace("\"llama\"", "\"mixtral\"")
        .replace("LlamaFor", "MixtralFor")
        .replace(
            "{",
            "{\"num_local_experts\": 4, \"num_experts_per_tok\": 2, ",
        );
    for (name, config) in [
        ("wordy", MODEL.replace("97", "9000")),
        (
            "balanced",
            moe.replace("{", "{\"output_router_logits\": true, "),
        ),
        ("moe", moe),
    ] {
        fs::create_dir(folder(name)).unwrap();
        fs::write(folder(name).join("config.json"), config).unwrap();
    }
    let mut silent: std::collections::BTreeSet<_> = rules::rule_list()
        .skip(STRUCTURAL_RULES.len() + crate::model::MODEL_RULES.len())
        .map(|(id, _)| id)
        .collect();
    for (sets, rule) in BREAKING.into_iter().chain(BREAKING_RUN) {
        // Overrides resolve paths from the current folder, so these are made absolute.
        let absolute = |set: &str| match set.split_once('=') {
            Some((key @ ("model" | "output" | "data.train"), path)) => {
                format!("{key}={}", folder(path).display())
            }
            _ => set.to_owned(),
        };
        let sets: Vec<_> = sets.split(' ').map(absolute).collect();
        let sets: Vec<_> = sets.iter().map(String::as_str).collect();
        let found = match desk.load(GOOD, &sets) {
            Ok(job) => job.warnings,
            Err(error) => error.diagnostics().to_vec(),
        };
        let fault = found.iter().find(|d| d.rule == rule);
        let fault = fault.unwrap_or_else(|| panic!("{sets:?} do not break {rule}: {found:#?}"));
        assert!(!fault.path.is_empty() && !fault.found.is_empty() && !fault.remedy.is_empty());
        silent.remove(rule);
    }
    assert!(silent.is_empty(), "no job here breaks {silent:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn random_text_never_panics(
        text in "[a-z:\\-\\[\\]{}&*!|>'\"#%@,? \n\t0-9.]{0,120}",
        set in "[a-z.=\\[\\]0-9:]{0,20}",
    ) {
        let desk = Desk::new();
        let _ = desk.load(&text, std::slice::from_ref(&set.as_str()));
        let _ = desk.load(&format!("{GOOD}{text}"), &[&set]);
    }

    #[test]
    fn random_jobs_round_trip(
        model in "\\PC{0,12}",
        seed in any::<u64>(),
        rate in any::<f64>().prop_filter("finite", |f| f.is_finite()),
        norm in proptest::option::of(0.0f64..1e9),
        size in 1usize..16384,
        key in "\\PC{0,6}",
        text in "\\PC{0,12}",
    ) {
        let value = serde_json::json!({
            "model": model, "backend": "b", "steps": 3, "output": "o", "seed": seed,
            "data": {"train": text}, "batch": {"global_batch_size": size},
            "optimizer": {"learning_rate": rate, "max_grad_norm": norm},
            "recompute": {"modules": ["norm", "attention_core"]},
            "backends": {key: {"x": [1, {"y": text}]}},
        });
        let job: JobConfig = serde_json::from_value(value).unwrap();
        let parsed = parse::parse(&job.to_yaml());
        prop_assert!(parsed.faults.is_empty(), "{:?}\n{}", parsed.faults, job.to_yaml());
        let again: JobConfig = serde_json::from_value(parsed.root.to_json()).unwrap();
        prop_assert_eq!(again, job);
    }
}

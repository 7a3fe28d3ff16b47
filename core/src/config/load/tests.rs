//! The loader against hand-written files: rows G01, G03, G04, G05 and G06 of the known failures among them.

mod every_rule;
mod in_code;
mod key_table;

use std::{fs, path::PathBuf, sync::Arc};

use super::*;
use crate::{
    DType,
    communicator::Communicator,
    engine::{Capability, DataParallel, Engine, TensorParallel, WeightInit},
    model::{Family, LocalModels},
    plan::TrainPlan,
};

/// A backend that claims little; `wide` claims tensor parallelism too.
#[derive(Debug)]
struct Claims {
    name: &'static str,
    tensor: bool,
}

/// Options with one key.
#[derive(Debug, schemars::JsonSchema)]
#[allow(dead_code, reason = "only its schema is used")]
#[serde(deny_unknown_fields)]
struct Options {
    /// Layers gathered ahead.
    #[schemars(default, range(min = 0, max = 8))]
    prefetch_layers: Option<usize>,
}

impl Backend for Claims {
    fn name(&self) -> &str {
        self.name
    }

    fn capability(&self) -> Capability {
        Capability {
            families: [Family::Llama].into(),
            compute: vec![DType::F32],
            reduce: vec![DType::F32],
            devices: ["cpu".to_owned()].into(),
            data_parallel: Some(DataParallel {
                max_ranks: Some(4),
                ..DataParallel::default()
            }),
            tensor_parallel: self.tensor.then(TensorParallel::default),
            checkpoints: !self.tensor,
            ..Capability::default()
        }
    }

    fn options_schema(&self) -> Option<schemars::Schema> {
        (!self.tensor).then(|| schemars::schema_for!(Options))
    }

    fn check(&self, job: &JobSpec) -> Vec<Diagnostic> {
        if job.config.seed == 13 {
            return vec![Diagnostic::error(
                "OWN-01",
                "seed",
                "13 is unlucky",
                "take another",
            )];
        }
        Vec::new()
    }

    fn plan(&self, _: &JobSpec) -> Result<TrainPlan> {
        Err(Error::new(ErrorKind::Unsupported, "plan", "only checks"))
    }

    fn build(
        &self,
        _: &TrainPlan,
        _: Arc<dyn Communicator>,
        _: WeightInit<'_>,
    ) -> Result<Box<dyn Engine>> {
        Err(Error::new(ErrorKind::Unsupported, "build", "only checks"))
    }
}

const NARROW: Claims = Claims {
    name: "narrow",
    tensor: false,
};
const WIDE: Claims = Claims {
    name: "wide",
    tensor: true,
};

/// A folder with a model, a data file, and room for a job.
struct Desk(tempfile::TempDir);

const MODEL: &str = r#"{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 97,
  "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
  "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
  "tie_word_embeddings": false, "hidden_act": "silu", "torch_dtype": "float32"}"#;

const GOOD: &str = "model: model
backend: narrow
steps: 10
output: out
data:
  train: train.jsonl
batch:
  global_batch_size: 8
";

impl Desk {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("model")).unwrap();
        fs::write(folder.path().join("model/config.json"), MODEL).unwrap();
        fs::write(folder.path().join("train.jsonl"), "{\"tokens\": [1, 2]}\n").unwrap();
        Self(folder)
    }

    fn load(&self, text: &str, overrides: &[&str]) -> Result<LoadedJob> {
        let source = JobSource::text(text, self.0.path());
        let overrides: Vec<_> = overrides.iter().map(|&o| o.to_owned()).collect();
        load_job(&source, &overrides, &[&NARROW, &WIDE], &LocalModels)
    }

    fn faults(&self, text: &str, overrides: &[&str]) -> Vec<Diagnostic> {
        let error = self.load(text, overrides).expect_err("the job is faulty");
        assert_eq!(error.kind().exit_code(), 2);
        let faults = error.diagnostics();
        faults
            .iter()
            .filter(|d| d.severity == Severity::Error)
            .cloned()
            .collect()
    }

    /// (line, rule, path) of each fault.
    fn brief(&self, text: &str, overrides: &[&str]) -> Vec<(usize, &'static str, String)> {
        let faults = self.faults(text, overrides);
        let brief = faults
            .into_iter()
            .map(|d| (d.line.unwrap_or(0), d.rule, d.path));
        brief.collect()
    }
}

fn one(desk: &Desk, text: &str, overrides: &[&str]) -> Diagnostic {
    let faults = desk.faults(text, overrides);
    assert_eq!(faults.len(), 1, "{faults:#?}");
    faults[0].clone()
}

#[test]
fn a_good_job_loads_with_paths_from_its_folder() {
    let desk = Desk::new();
    let job = desk
        .load(GOOD, &["optimizer.learning_rate=1e-4", "backend=wide"])
        .unwrap();
    assert_eq!(job.spec.config.optimizer.learning_rate, 1e-4);
    assert_eq!(job.backend, 1);
    assert_eq!(
        job.spec.config.data.train,
        desk.0.path().join("train.jsonl")
    );
    assert_eq!(job.model_folder, desk.0.path().join("model"));
    assert_eq!(job.spec.model.vocab_size, 97);
    assert_eq!(job.warnings, []);
}

#[test]
fn paths_of_an_override_start_from_the_current_folder() {
    let desk = Desk::new();
    let job = desk.load(GOOD, &["output=elsewhere"]).unwrap();
    let current = std::env::current_dir().unwrap();
    assert_eq!(job.spec.config.output, current.join("elsewhere"));
}

#[test]
fn five_faults_give_five_reports() {
    let desk = Desk::new();
    let text = "model: model
backend: narow
steps: ten
output: out
data:
  train: train.jsonl
batch:
  global_batch_size: 0
parallel:
  tensor-parallel-size: 2
objective:
  temperature: 0
";
    let faults = desk.faults(text, &[]);
    let brief: Vec<_> = faults
        .iter()
        .map(|d| (d.line.unwrap(), d.rule, d.path.as_str()))
        .collect();
    assert_eq!(
        brief,
        [
            (2, "CFG-04", "backend"),
            (3, "CFG-02", "steps"),
            (8, "CFG-05", "batch.global_batch_size"),
            (10, "CFG-01", "parallel.tensor-parallel-size"),
            (12, "OBJ-01", "objective.temperature"),
        ]
    );
    let remedies: Vec<_> = faults.iter().map(|d| d.remedy.as_str()).collect();
    assert_eq!(remedies[0], "write `narrow`; allowed are narrow, wide");
    assert!(remedies[1].contains("whole number"), "{remedies:?}");
    assert!(remedies[2].contains("at least 1"), "{remedies:?}");
    assert_eq!(remedies[3], "write `tensor_parallel_size`");
    assert!(remedies[4].contains("above 0"), "{remedies:?}");
}

/// G01.
#[test]
fn unknown_keys_name_the_nearest_valid_one() {
    let desk = Desk::new();
    let with = |more: &str| one(&desk, &format!("{GOOD}{more}"), &[]);
    let short = with("parallel:\n  tensor_parallel: 2\n");
    assert_eq!(
        (short.rule, short.path.as_str()),
        ("CFG-01", "parallel.tensor_parallel")
    );
    assert_eq!(
        (short.line, short.remedy.as_str()),
        (Some(10), "write `tensor_parallel_size`")
    );
    let high = with("tensor_parallel_size: 2\n");
    assert_eq!(high.path, "tensor_parallel_size");
    assert_eq!(
        high.remedy,
        "`tensor_parallel_size` belongs under `parallel:`"
    );
    let hyphen = with("parallel:\n  tensor-parallel-size: 2\n");
    assert_eq!(hyphen.remedy, "write `tensor_parallel_size`");
    let low = with("optimizer:\n  steps: 2\n");
    assert_eq!(low.remedy, "`steps` belongs at the top level");
    let foreign = with("lr: 1e-3\n");
    assert_eq!(foreign.remedy, "`learning_rate` belongs under `optimizer:`");
    let nothing = with("optimizer:\n  zzz: 2\n");
    assert!(
        nothing.remedy.contains("learning_rate, beta1"),
        "{}",
        nothing.remedy
    );
    let misspelt_required = one(&desk, &GOOD.replace("steps:", "step:"), &[]);
    assert_eq!(misspelt_required.remedy, "write `steps`");
}

#[test]
fn missing_keys_say_what_belongs_there() {
    let desk = Desk::new();
    let faults = desk.faults("backend: narrow\nsteps: 3\noutput: out\ndata: {}\n", &[]);
    let brief: Vec<_> = faults
        .iter()
        .map(|d| (d.line, d.rule, d.path.as_str()))
        .collect();
    assert_eq!(
        brief,
        [
            (Some(1), "CFG-03", "batch"),
            (Some(1), "CFG-03", "model"),
            (Some(4), "CFG-03", "data.train"),
        ]
    );
    assert_eq!(
        faults[2].remedy,
        "add `train:` (a jsonl file with a sequence a line; text)"
    );
    assert_eq!(desk.faults("", &[]).len(), 6);
}

/// G03: a mini-batch of 2 with micro-batches of 4; a mini-batch of 2 on 4 ranks.
#[test]
fn impossible_batches_show_all_numbers() {
    let desk = Desk::new();
    let small = GOOD.replace("global_batch_size: 8", "global_batch_size: 2");
    let micro = one(&desk, &format!("{small}  micro_batch_size: 4\n"), &[]);
    assert_eq!((micro.rule, micro.line), ("BATCH-02", Some(9)));
    for number in [
        "4 sequences",
        "share is 2",
        "global_batch_size 2",
        "1 data-parallel",
    ] {
        assert!(micro.found.contains(number), "{}", micro.found);
    }
    let idle = one(
        &desk,
        &format!("{small}parallel:\n  data_parallel_size: 4\n"),
        &[],
    );
    assert_eq!((idle.rule, idle.line), ("BATCH-01", Some(8)));
    assert!(idle.found.contains("2 sequences") && idle.found.contains("4 data-parallel"));
}

/// G04: a global batch of 249 with micro-batches of 2 is planned exactly, so it is no fault; over 2 ranks it is
/// a warning that names the uneven share.
#[test]
fn uneven_batches_are_planned_exactly() {
    use crate::plan::{MicrobatchLimit, plan_microbatches};
    let desk = Desk::new();
    let uneven = GOOD.replace(
        "global_batch_size: 8",
        "global_batch_size: 249\n  micro_batch_size: 2",
    );
    assert_eq!(desk.load(&uneven, &[]).unwrap().warnings, []);
    let warnings = desk
        .load(&uneven, &["parallel.data_parallel_size=2"])
        .unwrap()
        .warnings;
    assert_eq!(warnings.len(), 1);
    assert_eq!((warnings[0].rule, warnings[0].line), ("BATCH-05", Some(8)));
    let starts: Vec<_> = (0..=249).collect();
    let plan = plan_microbatches(&[3; 249], &starts, 2, MicrobatchLimit::Sequences(2), 1).unwrap();
    let mut seen: Vec<_> = (0..2).flat_map(|r| plan.sequences(r)).collect();
    seen.sort_unstable();
    assert_eq!(seen, (0..249).collect::<Vec<_>>());
}

/// G05.
#[test]
fn a_wrong_world_size_prints_each_factor_and_the_choices() {
    let desk = Desk::new();
    let text = format!(
        "{GOOD}parallel:\n  world_size: 4\n  tensor_parallel_size: 1\n  pipeline_parallel_size: 2\n  expert_parallel_size: 4\n"
    );
    let faults = desk.faults(&text, &[]);
    let mesh = faults.iter().find(|d| d.rule == "MESH-01").unwrap();
    assert_eq!(
        (mesh.line, mesh.path.as_str()),
        (Some(10), "parallel.world_size")
    );
    assert_eq!(
        mesh.found,
        "pipeline_parallel_size 2 x data_parallel_size 1 x context_parallel_size 1 x tensor_parallel_size 1 = 2 \
         ranks, but world_size is 4; expert_parallel_size 4 lies within data x context x tensor and is no factor"
    );
    assert_eq!(
        mesh.remedy,
        "set one of world_size: 2; pipeline_parallel_size: 4; data_parallel_size: 2; context_parallel_size: 2; \
         tensor_parallel_size: 2"
    );
    let others: Vec<_> = faults.iter().map(|d| d.rule).collect();
    assert_eq!(others, ["MESH-01", "PP-01", "EP-01", "EP-02", "EP-04"]);
}

/// G06: fp16 is refused, a timeout arrives as written, and the saved config is the resolved input.
#[test]
fn precision_and_timeout_are_honoured_and_the_saved_config_is_true() {
    let desk = Desk::new();
    let f16 = one(&desk, &format!("{GOOD}precision:\n  compute: f16\n"), &[]);
    assert_eq!((f16.rule, f16.line), ("DTYPE-02", Some(10)));
    let text = format!("{GOOD}timeout_seconds: 3\n");
    let job = desk.load(&text, &["optimizer.beta2=0.99"]).unwrap();
    assert_eq!(job.spec.config.timeout_seconds, 3.0);
    let saved = job.spec.config.to_yaml();
    assert!(
        saved.contains("timeout_seconds: 3") && saved.contains("beta2: 0.99"),
        "{saved}"
    );
    let again = load_job(
        &JobSource::text(saved, PathBuf::from("/nowhere")),
        &[],
        &[&NARROW, &WIDE],
        &LocalModels,
    );
    assert_eq!(again.unwrap().spec, job.spec);
}

#[test]
fn capability_names_who_offers_it() {
    let desk = Desk::new();
    let text = format!("{GOOD}parallel:\n  tensor_parallel_size: 2\n");
    let tensor = one(&desk, &text, &[]);
    assert_eq!((tensor.rule, tensor.line), ("TP-01", Some(10)));
    assert_eq!(
        tensor.remedy,
        "write 1, or choose a backend that offers it: `wide`"
    );
    assert!(desk.load(&text, &["backend=wide"]).is_ok());
    let three = desk.brief(&text.replace("size: 2", "size: 3"), &["backend=wide"]);
    assert_eq!(
        three[0],
        (10, "TP-02", "parallel.tensor_parallel_size".to_owned())
    );
    let bf16 = one(&desk, &format!("{GOOD}precision:\n  compute: bf16\n"), &[]);
    assert!(
        bf16.rule == "DTYPE-01" && bf16.remedy.contains("no backend here"),
        "{bf16}"
    );
}

#[test]
fn options_are_checked_against_each_backend() {
    let desk = Desk::new();
    let with = |options: &str| desk.brief(&format!("{GOOD}backends:\n{options}"), &[]);
    let unknown = with("  narrow:\n    prefetch: 2\n");
    assert_eq!(
        unknown,
        [(11, "CFG-01", "backends.narrow.prefetch".to_owned())]
    );
    let range = with("  narrow:\n    prefetch_layers: 9\n");
    assert_eq!(
        range,
        [(11, "CFG-05", "backends.narrow.prefetch_layers".to_owned())]
    );
    let of_another = with("  wide:\n    anything: 1\n");
    assert_eq!(
        of_another,
        [(11, "CFG-01", "backends.wide.anything".to_owned())]
    );
    let misspelt = with("  narrov: {}\n");
    assert_eq!(misspelt, [(10, "CFG-01", "backends.narrov".to_owned())]);
    let job = desk
        .load(&format!("{GOOD}backends:\n  zorg: {{a: 1}}\n"), &[])
        .unwrap();
    assert_eq!(job.warnings.len(), 1);
}

#[test]
fn the_backends_own_faults_get_their_lines() {
    let desk = Desk::new();
    let own = one(&desk, &format!("{GOOD}seed: 13\n"), &[]);
    assert_eq!((own.rule, own.line), ("OWN-01", Some(9)));
    let from_set = one(&desk, GOOD, &["seed=13"]);
    assert_eq!(from_set.line, None);
    assert!(
        from_set.found.ends_with("(from --set)"),
        "{}",
        from_set.found
    );
    let beside = desk.brief(&format!("{GOOD}seed: 13\noptimizer:\n  beta1: big\n"), &[]);
    assert_eq!(beside.len(), 2, "{beside:?}");
}

#[test]
fn yaml_faults_have_line_and_column() {
    let desk = Desk::new();
    let broken = one(&desk, "model: model\nsteps: [1\nbackend: x\n", &[]);
    assert_eq!(broken.rule, "CFG-00");
    assert!(
        broken.line >= Some(2) && broken.found.contains("column"),
        "{broken}"
    );
    let twice = one(&desk, &format!("{GOOD}steps: 11\n"), &[]);
    assert_eq!((twice.rule, twice.line), ("CFG-06", Some(9)));
    assert!(twice.found.contains("line 3"), "{}", twice.found);
    for (text, rule) in [
        ("<<: *a\n", "CFG-07"),
        ("a: *b\n", "CFG-00"),
        ("b: &a {x: 1}\nc: {<<: *a}\n", "CFG-07"),
        ("? [a, b]\n: 1\n", "CFG-07"),
        ("a: 1\n---\nb: 1\n", "CFG-07"),
        ("a: &a [*a]\n", "CFG-07"),
        ("a: !mine 1\n", "CFG-07"),
        ("- 1\n", "CFG-02"),
        ("just words\n", "CFG-02"),
    ] {
        let rules: Vec<_> = desk.faults(text, &[]).iter().map(|d| d.rule).collect();
        assert!(rules.contains(&rule), "{text}: {rules:?}");
    }
    let deep = format!("a: {}", "[".repeat(100_000));
    assert_eq!(one(&desk, &deep, &[]).rule, "CFG-00");
}

#[test]
fn aliases_stand_for_whole_values_but_not_for_a_bomb() {
    let desk = Desk::new();
    let text = GOOD
        .replace("steps: 10", "steps: &n 10\nseed: *n")
        .replace("output: out", "output: &o out");
    assert!(desk.load(&text, &[]).is_ok());
    let mut bomb = "a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n".to_owned();
    for i in 1..9 {
        let items = vec![format!("*a{}", i - 1); 10].join(",");
        bomb.push_str(&format!("a{i}: &a{i} [{items}]\n"));
    }
    assert_eq!(one(&desk, &bomb, &[]).rule, "CFG-07");
}

#[test]
fn numbers_by_yaml_1_2() {
    let desk = Desk::new();
    let good = |set: &str| desk.load(GOOD, &[set]).unwrap().spec.config;
    assert_eq!(good("optimizer.epsilon=1e-4").optimizer.epsilon, 1e-4);
    assert_eq!(good("steps=1e3").steps, 1000);
    assert_eq!(good("seed=18446744073709551615").seed, u64::MAX);
    assert_eq!(
        good("optimizer.max_grad_norm=null").optimizer.max_grad_norm,
        None
    );
    for (set, rule) in [
        ("seed=18446744073709551616", "CFG-05"),
        ("steps=1.5", "CFG-02"),
        ("seed=-1", "CFG-05"),
        ("optimizer.beta1=.nan", "CFG-02"),
        ("from_scratch=yes", "CFG-02"),
        ("optimizer=", "CFG-02"),
        ("steps", "CFG-08"),
        ("steps=[1", "CFG-08"),
        ("steps.x=1", "CFG-02"),
        ("parallel.tensor_paralel_size=2", "CFG-01"),
    ] {
        let fault = one(&desk, GOOD, &[set]);
        assert_eq!((fault.rule, fault.line), (rule, None), "{set}: {fault}");
        assert!(fault.found.contains("(from --set)"), "{set}: {fault}");
    }
}

#[test]
fn a_missing_model_does_not_hide_the_rest() {
    let desk = Desk::new();
    let text = GOOD.replace("model: model", "model: nowhere/model") + "optimizer:\n  beta1: 1\n";
    let brief = desk.brief(&text, &[]);
    let expected = [
        (1, "MODEL-01", "model".to_owned()),
        (10, "OPT-01", "optimizer.beta1".to_owned()),
    ];
    assert_eq!(brief, expected);
    // Both readings: an id that the resolver does not know, and a folder beside the job.
    let error = desk.load(&text, &[]).unwrap_err();
    let found = &error.diagnostics()[0].found;
    let folder = desk.0.path().join("nowhere/model");
    assert!(found.contains("no such model folder"), "{found}");
    assert!(found.contains(&format!("{}", folder.display())), "{found}");
    fs::write(
        desk.0.path().join("model/config.json"),
        "{\"model_type\": \"bert\"}",
    )
    .unwrap();
    assert_eq!(one(&desk, GOOD, &[]).rule, "MODEL-02");
}

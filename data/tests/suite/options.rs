//! What a job says of its data.

use std::path::Path;

use drivetrain_core::{
    config::{JobConfig, JobSpec, Overlong},
    model::ModelSpec,
};
use drivetrain_data::DatasetOptions;
use serde_json::json;

fn job(data: serde_json::Value) -> JobSpec {
    let config = json!({"model": "m", "backend": "b", "steps": 1, "output": "o", "data": data,
        "batch": {"global_batch_size": 1}});
    let config: JobConfig = serde_json::from_value(config).unwrap();
    let model = json!({"model_type": "llama", "vocab_size": 97, "hidden_size": 8, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "rope_theta": 1e4, "max_position_embeddings": 128, "hidden_act": "silu", "tie_word_embeddings": false});
    let model = ModelSpec::from_hf_config(&model.to_string(), Path::new("config.json")).unwrap();
    JobSpec { config, model }
}

#[test]
fn the_models_limits_are_the_defaults() {
    let folder = Path::new("models/m");
    let options = DatasetOptions::of_job(&job(json!({"train": "t.jsonl"})), folder);
    assert_eq!((options.vocab_size, options.max_length), (97, 128));
    assert_eq!((options.overlong, options.shuffle), (Overlong::Error, true));
    assert_eq!(options.tokenizer, folder);
    let said = json!({"train": "t.jsonl", "max_length": 16, "overlong": "skip", "shuffle": false});
    let options = DatasetOptions::of_job(&job(said), folder);
    assert_eq!(
        (options.max_length, options.overlong, options.shuffle),
        (16, Overlong::Skip, false)
    );
}

use std::path::Path;

use serde_json::{Value, json};

use crate::{
    DType, ErrorKind, Result,
    model::{Family, MlpSpec, ModelSpec, RopeScaling},
};

fn read(config: &Value) -> Result<ModelSpec> {
    ModelSpec::from_hf_config(&config.to_string(), Path::new("dir/config.json"))
}

fn tiny(model_type: &str) -> Value {
    json!({
        "model_type": model_type, "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
        "max_position_embeddings": 128,
    })
}

fn with(model_type: &str, changes: Value) -> Value {
    let mut config = tiny(model_type);
    let map = config.as_object_mut().unwrap();
    map.extend(changes.as_object().unwrap().clone());
    config
}

/// Kind, key and found of the error that this change to a tiny config makes.
fn refusal(model_type: &str, changes: Value) -> (ErrorKind, String, String) {
    let error = read(&with(model_type, changes)).unwrap_err();
    assert_eq!(error.context("file"), Some("dir/config.json"));
    let text = |key| error.context(key).unwrap().to_owned();
    (error.kind(), text("key"), text("found"))
}

#[test]
fn head_dim_is_explicit_or_null_or_the_familys_default() {
    // C02
    let explicit = read(&with("qwen3", json!({"head_dim": 16}))).unwrap();
    let q = |spec: &ModelSpec| {
        let list = spec.parameters();
        let name = "model.layers.0.self_attn.q_proj.weight";
        list.iter().find(|p| p.name == name).unwrap().shape.clone()
    };
    assert_eq!(q(&explicit), [64, 32]);
    assert_eq!(
        read(&with("qwen3", json!({"head_dim": null})))
            .unwrap()
            .head_dim,
        8
    );
    assert_eq!(read(&tiny("qwen3")).unwrap().head_dim, 128);
    for family in ["llama", "mistral", "qwen2", "mixtral", "qwen3_moe"] {
        assert_eq!(read(&tiny(family)).unwrap().head_dim, 8, "{family}");
    }
    let (kind, key, _) = refusal("llama", json!({"num_attention_heads": 6}));
    assert_eq!((kind, key.as_str()), (ErrorKind::File, "hidden_size"));
}

#[test]
fn families_differ_where_they_should() {
    let spec = |family: &str| read(&tiny(family)).unwrap();
    assert!(spec("qwen2").qkv_bias && !spec("llama").qkv_bias && !spec("qwen3").qkv_bias);
    assert!(spec("qwen3").qk_norm && spec("qwen3_moe").qk_norm && !spec("qwen2").qk_norm);
    assert_eq!(spec("mixtral").family, Family::Mixtral);
    assert!(spec("mixtral").moe.unwrap().norm_topk_prob);
    assert!(!spec("qwen3_moe").moe.unwrap().norm_topk_prob);
    assert_eq!(spec("mixtral").rope.theta, 1e6);
    assert_eq!(spec("mixtral").rms_norm_eps, 1e-5);
    assert_eq!(spec("llama").rms_norm_eps, 1e-6);
    assert!(!spec("llama").tied_embeddings);
    assert_eq!(spec("llama").dtype, DType::F32);
}

#[test]
fn absent_and_null_kv_heads() {
    let kv = |family: &str, null: bool| {
        let mut config = with(family, json!({"num_attention_heads": 32, "head_dim": 2}));
        let map = config.as_object_mut().unwrap();
        map.shift_remove("num_key_value_heads");
        if null {
            map.insert("num_key_value_heads".into(), Value::Null);
        }
        read(&config).unwrap().num_kv_heads
    };
    let families = ["llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe"];
    assert_eq!(families.map(|f| kv(f, false)), [32, 8, 32, 32, 8, 4]);
    assert_eq!(families.map(|f| kv(f, true)), [32; 6]);
}

#[test]
fn windows_by_family_and_layer() {
    let windows = |family: &str, changes: Value| -> Vec<Option<usize>> {
        let spec = read(&with(family, changes)).unwrap();
        spec.layers.iter().map(|l| l.sliding_window).collect()
    };
    let (w, n) = (Some(8), None);
    assert_eq!(windows("llama", json!({"sliding_window": 8})), [n; 4]);
    assert_eq!(windows("mistral", json!({"sliding_window": 8})), [w; 4]);
    assert_eq!(windows("mistral", json!({"sliding_window": null})), [n; 4]);
    assert_eq!(windows("mistral", json!({})), [Some(4096); 4]);
    assert_eq!(windows("mixtral", json!({})), [n; 4]);
    assert_eq!(windows("qwen2", json!({"sliding_window": 8})), [n; 4]);
    let on = json!({"sliding_window": 8, "use_sliding_window": true, "max_window_layers": 3});
    assert_eq!(windows("qwen2", on.clone()), [n, n, n, w]);
    assert_eq!(windows("qwen3", on.clone()), [n, n, n, w]);
    assert_eq!(windows("qwen3_moe", on.clone()), [w; 4]);
    let mut typed = on;
    let (full, sliding) = ("full_attention", "sliding_attention");
    typed["layer_types"] = json!([sliding, full, sliding, full]);
    assert_eq!(windows("qwen3", typed), [w, n, w, n]);

    let (kind, key, _) = refusal("qwen2", json!({"layer_types": [full, full, full, sliding]}));
    assert_eq!((kind, key.as_str()), (ErrorKind::File, "layer_types"));
    let (kind, ..) = refusal(
        "qwen2",
        json!({"layer_types": [full, full, full, "linear_attention"]}),
    );
    assert_eq!(kind, ErrorKind::Unsupported);
    let (kind, ..) = refusal("qwen2", json!({"layer_types": [full]}));
    assert_eq!(kind, ErrorKind::File);
}

#[test]
fn sparse_layers_of_qwen3_moe() {
    let layers = |changes: Value| -> Vec<bool> {
        let spec = read(&with("qwen3_moe", changes)).unwrap();
        assert_eq!(
            spec.moe.is_some(),
            spec.layers.iter().any(|l| l.mlp == MlpSpec::Moe)
        );
        spec.layers.iter().map(|l| l.mlp == MlpSpec::Moe).collect()
    };
    assert_eq!(layers(json!({})), [true; 4]);
    assert_eq!(
        layers(json!({"decoder_sparse_step": 2})),
        [false, true, false, true]
    );
    assert_eq!(
        layers(json!({"mlp_only_layers": [0]})),
        [false, true, true, true]
    );
    assert_eq!(layers(json!({"decoder_sparse_step": 5})), [false; 4]);
    let spec = read(&with(
        "qwen3_moe",
        json!({"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16,
               "norm_topk_prob": true}),
    ));
    let moe = spec.unwrap().moe.unwrap();
    assert_eq!(
        (moe.num_experts, moe.experts_per_token, moe.ffn_size),
        (8, 3, 16)
    );
    assert!(moe.norm_topk_prob);
    assert_eq!(moe.aux_loss_coefficient, 0.0);
    let (_, key, _) = refusal("mixtral", json!({"num_experts_per_tok": 9}));
    assert_eq!(key, "num_experts_per_tok");
}

#[test]
fn rope_in_both_spellings() {
    let rope = |changes: Value| read(&with("llama", changes)).unwrap().rope;
    assert_eq!(rope(json!({})).theta, 1e4);
    assert_eq!(rope(json!({"rope_theta": 5e5})).theta, 5e5);
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32});
    let old = rope(json!({"rope_theta": 5e5, "rope_scaling": llama3}));
    let mut inside = llama3.clone();
    inside["rope_theta"] = json!(5e5);
    assert_eq!(rope(json!({"rope_parameters": inside})), old);
    assert!(matches!(
        old.scaling,
        RopeScaling::Llama3 {
            original_max_position: 32,
            ..
        }
    ));
    let linear = json!({"type": "linear", "factor": 2.0});
    let expected = RopeScaling::Linear { factor: 2.0 };
    assert_eq!(rope(json!({"rope_scaling": linear})).scaling, expected);
    assert_eq!(
        rope(json!({"rope_scaling": null})).scaling,
        RopeScaling::None
    );

    for (changes, kind, key) in [
        (
            json!({"type": "dynamic", "factor": 2.0}),
            ErrorKind::Unsupported,
            "rope_scaling.rope_type",
        ),
        (
            json!({"type": "linear"}),
            ErrorKind::File,
            "rope_scaling.factor",
        ),
        (
            json!({"type": "linear", "factor": 0}),
            ErrorKind::File,
            "rope_scaling.factor",
        ),
        (
            json!({"type": "linear", "rope_type": "yarn"}),
            ErrorKind::File,
            "rope_scaling.type",
        ),
        (
            json!({"full_attention": {"rope_type": "default"}}),
            ErrorKind::Unsupported,
            "rope_scaling.full_attention",
        ),
    ] {
        let found = refusal("llama", json!({"rope_scaling": changes}));
        assert_eq!((found.0, found.1.as_str()), (kind, key));
    }
    let (_, key, _) = refusal(
        "llama",
        json!({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 2e4}}),
    );
    assert_eq!(key, "rope_theta");
}

#[test]
fn yarn_takes_the_defaults_of_transformers() {
    let yarn = |extra: Value| {
        let mut inside = json!({"rope_type": "yarn", "factor": 4.0});
        inside
            .as_object_mut()
            .unwrap()
            .extend(extra.as_object().unwrap().clone());
        read(&with("qwen2", json!({"rope_parameters": inside})))
            .unwrap()
            .rope
    };
    let plain = yarn(json!({}));
    let RopeScaling::Yarn {
        beta_fast,
        beta_slow,
        truncate,
        original_max_position,
        ..
    } = plain.scaling
    else {
        panic!("{plain:?}");
    };
    assert_eq!(
        (beta_fast, beta_slow, truncate, original_max_position),
        (32.0, 1.0, true, 128)
    );
    // 0.1 ln 4 + 1
    assert!((plain.attention_factor() - 1.138_629_436_111_989).abs() < 1e-15);
    assert_eq!(
        yarn(json!({"attention_factor": 1.5})).attention_factor(),
        1.5
    );
    // (0.1 x 2 ln 4 + 1) / (0.1 ln 4 + 1)
    let both = yarn(json!({"mscale": 2.0, "mscale_all_dim": 1.0})).attention_factor();
    assert!((both - 1.121_751_143_713_058).abs() < 1e-12, "{both}");
    assert_eq!(
        yarn(json!({"mscale": 2.0})).attention_factor(),
        plain.attention_factor()
    );
    let implied = yarn(json!({"factor": null, "original_max_position_embeddings": 32}));
    assert!(matches!(
        implied.scaling,
        RopeScaling::Yarn { factor: 4.0, .. }
    ));
}

#[test]
fn unsupported_is_refused_by_name() {
    for (family, changes, key) in [
        ("gpt2", json!({}), "model_type"),
        (
            "llama",
            json!({"architectures": ["LlamaForSequenceClassification"]}),
            "architectures",
        ),
        ("llama", json!({"attention_bias": true}), "attention_bias"),
        ("qwen3", json!({"attention_bias": true}), "attention_bias"),
        ("llama", json!({"mlp_bias": true}), "mlp_bias"),
        ("llama", json!({"hidden_act": "gelu"}), "hidden_act"),
        (
            "llama",
            json!({"attention_dropout": 0.1}),
            "attention_dropout",
        ),
        (
            "mixtral",
            json!({"router_jitter_noise": 0.1}),
            "router_jitter_noise",
        ),
        (
            "llama",
            json!({"partial_rotary_factor": 0.5}),
            "partial_rotary_factor",
        ),
        (
            "llama",
            json!({"quantization_config": {"bits": 4}}),
            "quantization_config",
        ),
        (
            "llama",
            json!({"auto_map": {"AutoModel": "x.Y"}}),
            "auto_map",
        ),
        ("llama", json!({"dtype": "float8_e4m3fn"}), "dtype"),
    ] {
        let (kind, found, _) = refusal(family, changes);
        assert_eq!((kind, found.as_str()), (ErrorKind::Unsupported, key));
    }
}

#[test]
fn inconsistent_or_hostile_sizes_are_errors() {
    for (changes, key) in [
        (json!({"num_key_value_heads": 3}), "num_key_value_heads"),
        (json!({"vocab_size": 0}), "vocab_size"),
        (json!({"hidden_size": -1}), "hidden_size"),
        (json!({"hidden_size": "32"}), "hidden_size"),
        (
            json!({"num_hidden_layers": 4_000_000_000u64}),
            "num_hidden_layers",
        ),
        (json!({"num_hidden_layers": u64::MAX}), "num_hidden_layers"),
        (json!({"intermediate_size": 1e30}), "intermediate_size"),
        (json!({"head_dim": 7}), "head_dim"),
        (json!({"rms_norm_eps": 0.0}), "rms_norm_eps"),
        (json!({"rope_theta": 1.0}), "rope_theta"),
        (
            json!({"dtype": "float32", "torch_dtype": "float16"}),
            "dtype",
        ),
        (
            json!({"num_hidden_layers": 8192, "hidden_size": 1 << 20, "intermediate_size": 1 << 22}),
            "hidden_size",
        ),
    ] {
        let (kind, found, _) = refusal("llama", changes);
        assert_eq!((kind, found.as_str()), (ErrorKind::File, key));
    }
    let (_, key, _) = refusal(
        "mixtral",
        json!({"num_hidden_layers": 8192, "num_local_experts": 8192}),
    );
    assert_eq!(key, "num_local_experts");
}

#[test]
fn dtypes_and_the_config_are_kept() {
    for (text, dtype) in [
        ("float32", DType::F32),
        ("bfloat16", DType::Bf16),
        ("float16", DType::F16),
        ("float64", DType::F64),
    ] {
        assert_eq!(
            read(&with("llama", json!({"torch_dtype": text})))
                .unwrap()
                .dtype,
            dtype
        );
        assert_eq!(
            read(&with("llama", json!({"dtype": text}))).unwrap().dtype,
            dtype
        );
    }
    let config = with("llama", json!({"bos_token_id": 1, "unheard_of": [1, 2]}));
    assert_eq!(Value::Object(read(&config).unwrap().config), config);
}

#[test]
fn what_is_not_json_names_file_and_line() {
    let error = ModelSpec::from_hf_config("{\n\"a\":", Path::new("d/config.json")).unwrap_err();
    assert_eq!(
        (error.kind(), error.context("line")),
        (ErrorKind::File, Some("2"))
    );
    assert_eq!(error.context("file"), Some("d/config.json"));
    let folder = tempfile::tempdir().unwrap();
    let error = ModelSpec::from_folder(folder.path()).unwrap_err();
    assert!(error.context("file").unwrap().ends_with("config.json"));
}

mod folder;
mod writer;

use std::{fs, path::Path};

use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value, json};

use crate::model::{ModelSpec, ParameterSpec};

pub(super) fn config() -> Value {
    json!({
        "model_type": "llama", "vocab_size": 7, "hidden_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 6,
        "max_position_embeddings": 16, "torch_dtype": "bfloat16", "bos_token_id": 3,
    })
}

pub(super) fn model(config: &Value) -> ModelSpec {
    ModelSpec::from_hf_config(&config.to_string(), Path::new("config.json")).unwrap()
}

/// Some values for each parameter: whole numbers below 128, exact in every float dtype.
pub(super) fn value(parameter: usize, element: usize) -> f32 {
    ((parameter * 16) % 128 + element % 61) as f32 - 64.0
}

pub(super) type Tensor = (String, Dtype, Vec<usize>, Vec<u8>);

pub(super) fn tensors(parameters: &[ParameterSpec], dtype: Dtype) -> Vec<Tensor> {
    let bytes = |number: usize, count: usize| -> Vec<u8> {
        (0..count)
            .flat_map(|i| {
                let x = value(number, i);
                match dtype {
                    Dtype::F64 => f64::from(x).to_le_bytes().to_vec(),
                    Dtype::F32 => x.to_le_bytes().to_vec(),
                    Dtype::BF16 => half::bf16::from_f32(x).to_le_bytes().to_vec(),
                    Dtype::F16 => half::f16::from_f32(x).to_le_bytes().to_vec(),
                    other => panic!("{other}"),
                }
            })
            .collect()
    };
    (parameters.iter().enumerate())
        .map(|(i, p)| {
            (
                p.name.clone(),
                dtype,
                p.shape.clone(),
                bytes(i, p.num_elements()),
            )
        })
        .collect()
}

pub(super) fn write(path: &Path, tensors: &[Tensor]) {
    let views = (tensors.iter()).map(|(name, dtype, shape, bytes)| {
        (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
    });
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

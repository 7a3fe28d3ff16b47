use super::*;
use crate::{
    batch::BatchBuilder,
    model::{Family, LayerSpec, MoeSpec, RopeScaling, RopeSpec},
};

fn model(mlps: &[MlpSpec], num_experts: usize) -> ModelSpec {
    let layer = |&mlp| LayerSpec {
        sliding_window: None,
        mlp,
    };
    ModelSpec {
        family: Family::Mixtral,
        vocab_size: 7,
        hidden_size: 4,
        num_heads: 1,
        num_kv_heads: 1,
        head_dim: 4,
        rms_norm_eps: 1e-5,
        rope: RopeSpec {
            theta: 1e4,
            scaling: RopeScaling::None,
        },
        max_position_embeddings: 16,
        tied_embeddings: false,
        qkv_bias: false,
        qk_norm: false,
        layers: mlps.iter().map(layer).collect(),
        moe: Some(MoeSpec {
            num_experts,
            experts_per_token: 1,
            ffn_size: 4,
            norm_topk_prob: true,
            aux_loss_coefficient: 0.0,
        }),
        dtype: crate::DType::F32,
        config: serde_json::Map::new(),
    }
}

fn losses(model: &ModelSpec, coefficient: f64) -> RouterLosses {
    let mut config = JobConfig::new("m", "b", 1, 1);
    config.moe.load_balancing_coefficient = Some(coefficient);
    config.moe.z_loss_coefficient = 0.5;
    RouterLosses::new(&config, model)
}

fn of_sequences(sequences: u64) -> BatchTotals {
    BatchTotals {
        sequences,
        ..BatchTotals::default()
    }
}

/// 4 experts, top-1: 4 where all tokens go to one with a softmax of 1, 1 where the load is even.
#[test]
fn the_loss_by_hand() {
    let losses = losses(&model(&[MlpSpec::Moe], 4), 1.0);
    let loss = |tokens: &[u64], probs: [f64; 4]| -> f64 {
        let slopes = losses.balancing_slopes(&of_sequences(1), 1, 10, tokens);
        // Each of the ten tokens has these probabilities.
        10.0 * slopes.iter().zip(probs).map(|(s, p)| s * p).sum::<f64>()
    };
    assert!((loss(&[10, 0, 0, 0], [1.0, 0.0, 0.0, 0.0]) - 4.0).abs() < 1e-12);
    assert!((loss(&[3, 3, 2, 2], [0.25; 4]) - 1.0).abs() < 1e-12);
    let nothing = losses.balancing_slopes(&of_sequences(0), 0, 0, &[0; 4]);
    assert_eq!(nothing, [0.0; 4]);
}

#[test]
fn layers_and_sequences_share_the_coefficient() {
    let dense = MlpSpec::Dense { ffn_size: 4 };
    let losses = losses(&model(&[MlpSpec::Moe, dense, MlpSpec::Moe], 2), 6.0);
    assert_eq!(losses.num_layers, 2);
    let slopes = losses.balancing_slopes(&of_sequences(3), 2, 5, &[5, 0]);
    // 6 x 2 sequences of 3 / 2 layers x 2 experts x 5 / 25.
    assert!((slopes[0] - 0.8).abs() < 1e-12 && slopes[1] == 0.0);
    assert!((losses.z_weight(&of_sequences(3), 5) - 0.5 / 30.0).abs() < 1e-12);
}

#[test]
fn the_model_asks_for_the_loss_and_the_job_has_the_last_word() {
    let mut model = model(&[MlpSpec::Moe], 2);
    let mut config = JobConfig::new("m", "b", 1, 1);
    assert_eq!(RouterLosses::new(&config, &model).balancing, None);
    if let Some(moe) = &mut model.moe {
        moe.aux_loss_coefficient = 0.02;
    }
    let own = RouterLosses::new(&config, &model);
    assert_eq!(own.balancing, Some(LoadBalancing::Global));
    assert_eq!(own.balancing_coefficient, 0.02);
    config.moe.load_balancing = Some(LoadBalancing::Sequence);
    let given = RouterLosses::new(&config, &model);
    assert_eq!(given.balancing, Some(LoadBalancing::Sequence));
    config.moe.load_balancing_coefficient = Some(0.0);
    assert_eq!(RouterLosses::new(&config, &model).balancing, None);
    config.moe.load_balancing_coefficient = Some(1.0);
    model.layers[0].mlp = MlpSpec::Dense { ffn_size: 4 };
    assert_eq!(RouterLosses::new(&config, &model).balancing, None);
}

#[test]
fn a_sequence_without_a_scored_token_counts_nowhere() {
    let mut builder = BatchBuilder::new();
    builder.push(&[1, 2, 3], Some(&[false; 3])).unwrap();
    builder.push(&[4, 5], None).unwrap();
    builder.push(&[6], None).unwrap();
    builder
        .push(&[1, 2, 3], Some(&[false, false, true]))
        .unwrap();
    let counted = CountedTokens::new(&builder.build().unwrap());
    assert_eq!(counted.lengths, [2, 3]);
    assert_eq!(counted.num_tokens(), 5);
    let none = None::<usize>;
    let (a, b) = (Some(0), Some(1));
    assert_eq!(counted.sequence, [none, none, none, a, a, none, b, b, b]);
}

#[test]
fn the_bias_moves_towards_the_mean_load() {
    let model = model(&[MlpSpec::Moe, MlpSpec::Dense { ffn_size: 4 }], 3);
    let mut bias = ExpertBias::zeros(&model);
    assert_eq!(bias.of(0), None);
    bias.update(0.5, &[vec![0, 0, 0], vec![]]);
    assert_eq!(bias.of(0), None, "no tokens are an even load");
    bias.update(0.5, &[vec![1, 2, 3], vec![]]);
    assert_eq!(bias.of(0), Some(&[0.5, 0.0, -0.5][..]));
    assert_eq!(bias.of(1), None);
    assert_eq!(no_expert_tokens(&model), [vec![0; 3], vec![]]);
}

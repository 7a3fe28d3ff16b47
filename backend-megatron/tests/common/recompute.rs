//! The layers in which Korthikanti et al. 2022 count activations, on the ranks that the issue of recomputation names:
//! hidden 1024, 16 heads, ffn 2752, one sequence of 1024 tokens, 4 layers, TP4 with sequence parallelism.
#![allow(dead_code)] // each target uses a part

use std::ops::Range;

use drivetrain_conformance::{
    fixture::dense,
    suite::{Layout, Subject},
};
use drivetrain_core::{
    DType, Result,
    batch::{Batch, BatchBuilder},
    config::{JobSpec, ParallelConfig, RecomputeModule},
    model::{Family, MlpSpec, ModelSpec},
    weights::WeightSource,
};
use drivetrain_megatron::Megatron;

pub(crate) const LAYERS: usize = 4;
pub(crate) const RANKS: usize = 4;
const HIDDEN: usize = 1024;
const HEADS: usize = 16;
const SEQUENCE: usize = 1024;

/// The paper's bytes a layer and rank, of activations of 2 bytes and masks of 1.
pub(crate) struct Paper {
    /// Tensor parallelism alone: `sbh (10 + 24/t + 5as/(ht))`.
    pub(crate) tensor: f64,
    /// With sequence parallelism: `34sbh/t + 5as^2b/t`.
    pub(crate) sequence: f64,
    /// With the attention core computed again as well: `34sbh/t`.
    pub(crate) selective: f64,
    /// All computed again: `2sbh`.
    pub(crate) full: f64,
}

/// Its figures for these layers.
pub(crate) fn paper() -> Paper {
    let (s, h, a, t) = (SEQUENCE as f64, HIDDEN as f64, HEADS as f64, RANKS as f64);
    Paper {
        tensor: s * h * (10.0 + 24.0 / t + 5.0 * a * s / (h * t)),
        sequence: 34.0 * s * h / t + 5.0 * a * s * s / t,
        selective: 34.0 * s * h / t,
        full: 2.0 * s * h,
    }
}

pub(crate) fn model() -> ModelSpec {
    let mut model = dense(Family::Llama, LAYERS);
    (model.hidden_size, model.num_heads, model.num_kv_heads) = (HIDDEN, HEADS, HEADS);
    (model.head_dim, model.max_position_embeddings) = (HIDDEN / HEADS, SEQUENCE);
    // The head is not what is measured.
    model.vocab_size = 64;
    for layer in &mut model.layers {
        layer.mlp = MlpSpec::Dense { ffn_size: 2752 };
    }
    model
}

/// What is kept for backward.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Choice {
    /// Modules that are computed again.
    pub(crate) modules: &'static [RecomputeModule],
    /// Layers of which all is.
    pub(crate) full_layers: usize,
    /// The dtype of the rest, if not f32.
    pub(crate) saved: Option<DType>,
}

/// The job that does so.
pub(crate) fn job(choice: Choice) -> JobSpec {
    let mut job = Subject::new(Megatron).job(&model());
    let parallel = ParallelConfig {
        tensor_parallel_size: RANKS,
        sequence_parallel: true,
        ..ParallelConfig::default()
    };
    let layout = Layout {
        modules: choice.modules,
        full_layers: choice.full_layers,
        saved_activations: choice.saved,
        ..Layout::parallel(parallel)
    };
    layout.lay_out(&mut job);
    job.config.data.max_length = Some(SEQUENCE);
    job.config.batch.micro_batch_size = Some(1);
    job
}

/// One sequence, all scored.
pub(crate) fn batch() -> Batch {
    let tokens: Vec<u32> = (0..SEQUENCE as u32).map(|t| t * 29 % 64).collect();
    let mut builder = BatchBuilder::new();
    builder.push(&tokens, None).unwrap();
    builder.build().unwrap()
}

/// Small weights, quick to make.
#[derive(Debug)]
pub(crate) struct Quick(pub(crate) ModelSpec);

impl WeightSource for Quick {
    fn names(&self) -> Vec<String> {
        self.0.parameters().into_iter().map(|p| p.name).collect()
    }

    fn describe(&self, name: &str) -> Result<(Vec<usize>, DType)> {
        let all = self.0.parameters();
        let spec = all.into_iter().find(|p| p.name == name);
        Ok(spec.map(|p| (p.shape, DType::F32)).unwrap())
    }

    fn read_runs(&self, name: &str, runs: &[Range<usize>]) -> Result<Vec<f32>> {
        let (shape, _) = self.describe(name)?;
        let value = |i: usize| match shape.len() {
            1 => 1.0,
            _ => ((i.wrapping_mul(2_654_435_761) >> 8) % 2048) as f32 / 2048.0 / 16.0 - 1.0 / 32.0,
        };
        Ok(runs.iter().flat_map(Clone::clone).map(value).collect())
    }
}

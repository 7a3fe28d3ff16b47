//! Random first weights, the same on any mesh: a value depends on (seed, parameter, index) alone.

use std::{f64::consts::TAU, ops::Range};

use indexmap::IndexMap;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::{
    DType, Error, ErrorKind, Result,
    model::{ModelSpec, ParameterKind, ParameterSpec},
    weights::{WeightSource, check_runs},
};

/// Weights drawn from a seed: norms 1, biases 0, all else normal with the config's `initializer_range`.
#[derive(Debug)]
pub struct SeededWeights {
    parameters: IndexMap<String, ParameterSpec>,
    seed: u64,
    std: f64,
}

impl SeededWeights {
    /// Weights of a model under a seed.
    pub fn new(model: &ModelSpec, seed: u64) -> Self {
        let std = model
            .config
            .get("initializer_range")
            .and_then(serde_json::Value::as_f64);
        Self {
            parameters: (model.parameters().into_iter())
                .map(|p| (p.name.clone(), p))
                .collect(),
            seed,
            std: std.unwrap_or(0.02),
        }
    }

    fn parameter(&self, name: &str) -> Result<&ParameterSpec> {
        self.parameters.get(name).ok_or_else(|| {
            let message = "the model has no such parameter";
            Error::new(ErrorKind::File, "draw_weights", message).with("tensor", name)
        })
    }
}

impl WeightSource for SeededWeights {
    fn names(&self) -> Vec<String> {
        self.parameters.keys().cloned().collect()
    }

    fn describe(&self, name: &str) -> Result<(Vec<usize>, DType)> {
        self.parameter(name).map(|p| (p.shape.clone(), p.dtype))
    }

    fn read_runs(&self, name: &str, runs: &[Range<usize>]) -> Result<Vec<f32>> {
        let parameter = self.parameter(name)?;
        let mut values = vec![0.0; check_runs(name, runs, parameter.num_elements())?];
        let mut rest = values.as_mut_slice();
        for run in runs {
            let (own, behind) = rest.split_at_mut(run.len());
            fill(self.seed, parameter, self.std, run.start, own);
            rest = behind;
        }
        Ok(values)
    }
}

/// Fills `out` with the parameter's values from flat index `start` on.
fn fill(seed: u64, parameter: &ParameterSpec, std: f64, start: usize, out: &mut [f32]) {
    match parameter.kind {
        ParameterKind::Norm | ParameterKind::HeadNorm => out.fill(1.0),
        ParameterKind::ColumnBias | ParameterKind::KeyValueBias => out.fill(0.0),
        _ => {
            let key = xxh3_64_with_seed(parameter.name.as_bytes(), seed);
            for (i, value) in out.iter_mut().enumerate() {
                *value = (std * normal(key, (start + i) as u64)) as f32;
            }
        }
    }
}

/// A standard normal for a counter (Box and Muller 1958).
fn normal(key: u64, counter: u64) -> f64 {
    let unit = |bits: u64| ((bits >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    let first = mix(key ^ mix(2 * counter));
    let second = mix(key ^ mix(2 * counter + 1));
    (-2.0 * unit(first).ln()).sqrt() * (TAU * unit(second)).cos()
}

/// The finaliser of SplitMix64 (Steele, Lea and Flood 2014).
fn mix(counter: u64) -> u64 {
    let mut z = counter.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameter(kind: ParameterKind) -> ParameterSpec {
        ParameterSpec {
            name: "w".to_owned(),
            shape: vec![100, 200],
            kind,
            layer: None,
            expert: None,
            dtype: DType::F32,
        }
    }

    #[test]
    fn any_part_equals_the_same_part_of_the_whole() {
        let p = parameter(ParameterKind::Head);
        let mut whole = vec![0.0; 20_000];
        fill(7, &p, 0.02, 0, &mut whole);
        let mut part = vec![0.0; 333];
        fill(7, &p, 0.02, 1_234, &mut part);
        assert_eq!(part, whole[1_234..1_234 + 333]);
        let mut other = vec![0.0; 333];
        fill(8, &p, 0.02, 1_234, &mut other);
        assert_ne!(part, other);
    }

    #[test]
    fn moments_are_those_of_a_normal() {
        let mut values = vec![0.0; 20_000];
        fill(1, &parameter(ParameterKind::Embedding), 1.0, 0, &mut values);
        let n = values.len() as f64;
        let moment = |k: i32| values.iter().map(|&v| f64::from(v).powi(k)).sum::<f64>() / n;
        // Standard errors at n = 20,000: 0.007, 0.010, 0.070.
        assert!(moment(1).abs() < 0.03, "{}", moment(1));
        assert!((moment(2) - 1.0).abs() < 0.04, "{}", moment(2));
        assert!((moment(4) - 3.0).abs() < 0.28, "{}", moment(4));
    }
}

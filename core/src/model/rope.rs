//! Rotary position embedding: frequencies and their scalings, as data.

use serde::{Deserialize, Serialize};

/// RoPE over the whole head, Hugging Face layout (first half with second half).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RopeSpec {
    /// Base of the frequencies.
    pub theta: f64,
    /// How they are stretched for longer sequences.
    pub scaling: RopeScaling,
}

/// How RoPE's frequencies are stretched.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RopeScaling {
    /// As they are.
    None,
    /// All divided by `factor` (position interpolation).
    Linear {
        /// The factor, above 0.
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided, high kept, a ramp between.
    Llama3 {
        /// What low frequencies are divided by.
        factor: f64,
        /// `original / low_freq_factor` is the wavelength above which all are divided.
        low_freq_factor: f64,
        /// `original / high_freq_factor` is the wavelength below which all are kept.
        high_freq_factor: f64,
        /// Sequence length of the original training.
        original_max_position: usize,
    },
    /// YaRN (Peng et al. 2023).
    Yarn {
        /// How much longer sequences get.
        factor: f64,
        /// Rotations above which a frequency is kept (32 in the paper).
        beta_fast: f64,
        /// Rotations below which it is divided (1 in the paper).
        beta_slow: f64,
        /// Scales cos and sin; the paper's `0.1 ln(factor) + 1` where the config gives none.
        attention_factor: f64,
        /// Whether the ramp's ends are rounded to whole dims.
        truncate: bool,
        /// Sequence length of the original training.
        original_max_position: usize,
    },
}

impl RopeSpec {
    /// Frequencies in radians a token, `[E / 2]`. Computed in f64 and rounded to f32 once, since f32 values are
    /// what trained models were given.
    pub fn inverse_frequencies(&self, head_dim: usize) -> Vec<f32> {
        (0..head_dim / 2)
            .map(|i| {
                let base = self.theta.powf(-(2.0 * i as f64) / head_dim as f64);
                self.scaled(base, i, head_dim) as f32
            })
            .collect()
    }

    /// What cos and sin are multiplied by: 1, but for YaRN.
    pub fn attention_factor(&self) -> f64 {
        match self.scaling {
            RopeScaling::Yarn {
                attention_factor, ..
            } => attention_factor,
            _ => 1.0,
        }
    }

    /// cos and sin for positions `0..num_positions`, each `[num_positions, E / 2]`; angles and functions in f64.
    pub fn tables(&self, head_dim: usize, num_positions: usize) -> (Vec<f32>, Vec<f32>) {
        let frequencies = self.inverse_frequencies(head_dim);
        let scale = self.attention_factor();
        let angles = (0..num_positions)
            .flat_map(|p| frequencies.iter().map(move |&f| p as f64 * f64::from(f)));
        angles
            .map(|a: f64| ((a.cos() * scale) as f32, (a.sin() * scale) as f32))
            .unzip()
    }

    fn scaled(&self, frequency: f64, index: usize, head_dim: usize) -> f64 {
        let wavelength = std::f64::consts::TAU / frequency;
        match self.scaling {
            RopeScaling::None => frequency,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position,
            } => {
                let original = original_max_position as f64;
                if wavelength < original / high_freq_factor {
                    frequency
                } else if wavelength > original / low_freq_factor {
                    frequency / factor
                } else {
                    let smooth = (original / wavelength - low_freq_factor)
                        / (high_freq_factor - low_freq_factor);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                }
            }
            RopeScaling::Yarn {
                factor,
                beta_fast,
                beta_slow,
                truncate,
                original_max_position,
                ..
            } => {
                let dim_of = |rotations: f64| {
                    let original = original_max_position as f64;
                    head_dim as f64 * (original / (rotations * std::f64::consts::TAU)).ln()
                        / (2.0 * self.theta.ln())
                };
                let (mut low, mut high) = (dim_of(beta_fast), dim_of(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                let (low, high) = (low.max(0.0), high.min(head_dim as f64 - 1.0));
                let width = if high == low { 0.001 } else { high - low };
                let ramp = ((index as f64 - low) / width).clamp(0.0, 1.0);
                frequency / factor * ramp + frequency * (1.0 - ramp)
            }
        }
    }
}

//! The model: `log_softmax(head(norm(embedding(token))) / temperature)`, forward and backward, a token at a
//! time. D model, V vocabulary.

use drivetrain_core::{Result, model::ParameterSpec, plan::TrainPlan, weights::WeightSource};
use indexmap::IndexMap;

const EMBEDDING: &str = "model.embed_tokens.weight";
const NORM: &str = "model.norm.weight";

/// Values by parameter, in the model's order.
pub(crate) type Tensors = IndexMap<String, Vec<f32>>;

/// The weights, or the gradients.
#[derive(Debug, Clone)]
pub(crate) struct Bigram {
    pub(crate) tensors: Tensors,
    head: &'static str,
    width: usize,
    epsilon: f64,
}

/// What backward needs of one token's forward.
#[derive(Debug)]
pub(crate) struct Saved {
    inverse_rms: f64,
    /// `[D]`, the normed embedding.
    normed: Vec<f64>,
    /// `[V]`.
    pub(crate) log_probs: Vec<f64>,
}

impl Bigram {
    pub(crate) fn zeros(plan: &TrainPlan) -> Self {
        let zeros = |p: &ParameterSpec| (p.name.clone(), vec![0.0; p.num_elements()]);
        Self {
            tensors: plan.parameters.iter().map(zeros).collect(),
            head: plan.model.head_name(),
            width: plan.model.hidden_size,
            epsilon: plan.model.rms_norm_eps,
        }
    }

    pub(crate) fn read(plan: &TrainPlan, source: &dyn WeightSource) -> Result<Self> {
        let mut model = Self::zeros(plan);
        for spec in &plan.parameters {
            model.tensors[&spec.name] = source.read(&spec.name)?;
        }
        Ok(model)
    }

    fn row(&self, name: &str, index: usize) -> &[f32] {
        &self.tensors[name][index * self.width..(index + 1) * self.width]
    }

    /// Log-probs of what follows `token`.
    pub(crate) fn forward(&self, token: u32, temperature: f64) -> Saved {
        let x = self.row(EMBEDDING, token as usize); // [D]
        let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / self.width as f64;
        let inverse_rms = 1.0 / (mean + self.epsilon).sqrt();
        let weights = &self.tensors[NORM];
        let normed = x.iter().zip(weights);
        let normed: Vec<_> = normed
            .map(|(&x, &w)| f64::from(x) * inverse_rms * f64::from(w))
            .collect();
        let mut log_probs: Vec<f64> = self.tensors[self.head]
            .chunks_exact(self.width)
            .map(|row| dot(row, &normed) / temperature)
            .collect(); // [V]
        let max = log_probs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = log_probs.iter().map(|l| (l - max).exp()).sum();
        log_probs.iter_mut().for_each(|l| *l -= max + sum.ln());
        Saved {
            inverse_rms,
            normed,
            log_probs,
        }
    }

    /// Adds to `gradients` what `d_log_prob` of `next` after `token` gives.
    pub(crate) fn backward(
        &self,
        (token, next): (u32, u32),
        saved: &Saved,
        d_log_prob: f64,
        temperature: f64,
        gradients: &mut Bigram,
    ) {
        let d = self.width;
        let mut d_normed = vec![0.0; d];
        let d_head = &mut gradients.tensors[self.head];
        for (id, log_prob) in saved.log_probs.iter().enumerate() {
            let one_hot = f64::from(u8::from(id == next as usize));
            let d_logit = d_log_prob * (one_hot - log_prob.exp()) / temperature;
            for i in 0..d {
                d_head[id * d + i] += (d_logit * saved.normed[i]) as f32;
                d_normed[i] += d_logit * f64::from(self.row(self.head, id)[i]);
            }
        }
        let (x, w) = (self.row(EMBEDDING, token as usize), &self.tensors[NORM]);
        let r = saved.inverse_rms;
        let inner = |i: usize| d_normed[i] * f64::from(w[i]) * f64::from(x[i]);
        let sum: f64 = (0..d).map(inner).sum();
        for i in 0..d {
            let xi = f64::from(x[i]);
            gradients.tensors[NORM][i] += (d_normed[i] * xi * r) as f32;
            let dx = r * d_normed[i] * f64::from(w[i]) - r.powi(3) * xi * sum / d as f64;
            gradients.tensors[EMBEDDING][token as usize * d + i] += dx as f32;
        }
    }
}

fn dot(row: &[f32], x: &[f64]) -> f64 {
    row.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum()
}

//! Logits to log-probs, entropies and back, in chunks of rows that stay within a budget. Products are in the dtype of
//! what comes in, all else in f32.
//!
//! With `z` the logits over the temperature and `p = softmax(z)`: `log_prob = z[target] - log sum exp z`,
//! `entropy = log sum exp z - sum p z`, and for a loss with derivatives `a = d/d log_prob`, `b = d/d entropy`,
//! `c_k = d/d log_prob_at[k]`: `dz = a onehot(target) + sum_k c_k onehot(id_k) - p (a + sum_k c_k)
//! - b p (log p + entropy)`.

use tch::{Device, Kind, Tensor};

use crate::{error::Torch, host::floats};

/// The head over scored rows.
#[derive(Debug)]
pub(crate) struct Head<'a> {
    /// `[V, D]`.
    pub(crate) weight: &'a Tensor,
    /// Divides the logits.
    pub(crate) temperature: f64,
    /// Bytes that logits and what is derived from them may take at once.
    pub(crate) budget_bytes: u64,
    /// Whether entropies are wanted.
    pub(crate) entropy: bool,
}

/// What the head computes for scored tokens.
#[derive(Debug, Default)]
pub(crate) struct TokenScores {
    /// `[S]`.
    pub(crate) log_probs: Vec<f64>,
    /// `[S]`, where wanted.
    pub(crate) entropy: Option<Vec<f64>>,
    /// `[S, k]`, where wanted.
    pub(crate) log_probs_at: Option<Vec<f64>>,
}

/// Derivatives of the loss, for scored tokens; all in f32 tensors.
#[derive(Debug)]
pub(crate) struct TokenGradients {
    /// `[S, 1]`.
    pub(crate) log_probs: Tensor,
    /// `[S, 1]`.
    pub(crate) entropy: Option<Tensor>,
    /// `[S, k]`.
    pub(crate) log_probs_at: Option<Tensor>,
}

/// Whose log-probs are wanted.
#[derive(Debug)]
pub(crate) struct Targets {
    /// The scored tokens, i64 `[S, 1]`.
    pub(crate) tokens: Tensor,
    /// Further ids, i64 `[S, k]`.
    pub(crate) at: Option<Tensor>,
}

impl Head<'_> {
    /// Scores of rows `hidden` `[S, D]`.
    pub(crate) fn score(&self, hidden: &Tensor, targets: &Targets) -> Torch<TokenScores> {
        let mut scores = self.no_scores(targets);
        for rows in self.chunks(hidden.size()[0]) {
            let targets = &targets.rows(rows)?;
            let chunk = self.chunk(&hidden.f_narrow(0, rows.0, rows.1)?, targets)?;
            chunk.append_to(&mut scores)?;
        }
        Ok(scores)
    }

    /// Back from derivatives: adds to `d_weight` `[V, D]` and returns the gradient of `hidden`. Chunks of logits are
    /// computed again; the scores come with them.
    pub(crate) fn backward(
        &self,
        hidden: &Tensor,
        targets: &Targets,
        gradients: &TokenGradients,
        d_weight: &mut Tensor,
    ) -> Torch<(TokenScores, Tensor)> {
        let mut scores = self.no_scores(targets);
        let d_hidden = hidden.f_empty_like()?;
        for rows in self.chunks(hidden.size()[0]) {
            let targets = &targets.rows(rows)?;
            let cut = |x: &Tensor| x.f_narrow(0, rows.0, rows.1);
            let input = cut(hidden)?;
            let chunk = self.chunk(&input, targets)?;
            chunk.append_to(&mut scores)?;
            let d_logits = chunk.backward(
                targets,
                &TokenGradients {
                    log_probs: cut(&gradients.log_probs)?,
                    entropy: gradients.entropy.as_ref().map(cut).transpose()?,
                    log_probs_at: gradients.log_probs_at.as_ref().map(cut).transpose()?,
                },
                self.temperature,
            )?;
            let d_logits = d_logits.f_to_kind(input.f_kind()?)?;
            let _ = d_logits.f_mm_out(&cut(&d_hidden)?, self.weight)?;
            if input.f_kind()? == Kind::Float {
                let _ = d_weight.f_addmm_(&d_logits.f_tr()?, &input)?;
            } else {
                let _ = d_weight.f_add_(&d_logits.f_tr()?.f_mm(&input)?)?;
            }
        }
        Ok((scores, d_hidden))
    }

    /// (first row, number of rows) of each chunk.
    fn chunks(&self, num_rows: i64) -> impl Iterator<Item = (i64, i64)> {
        let buffers = if self.entropy { 2 } else { 1 };
        let row_bytes = (self.weight.size()[0] as u64).max(1) * buffers * size_of::<f32>() as u64;
        let rows = (num_rows as u64).max(1);
        let most = (self.budget_bytes / row_bytes).clamp(1, rows);
        // As even as can be: a last chunk of a few rows would waste its pass over the weight.
        let step = rows.div_ceil(rows.div_ceil(most)) as i64;
        (0..num_rows)
            .step_by(step as usize)
            .map(move |start| (start, step.min(num_rows - start)))
    }

    fn no_scores(&self, targets: &Targets) -> TokenScores {
        TokenScores {
            log_probs: Vec::new(),
            entropy: self.entropy.then(Vec::new),
            log_probs_at: targets.at.as_ref().map(|_| Vec::new()),
        }
    }

    fn chunk(&self, hidden: &Tensor, targets: &Targets) -> Torch<Chunk> {
        let logits = hidden.f_mm(&self.weight.f_tr()?)?; // [S', V]
        // What follows is in f32, whatever the product was in.
        let mut logits = logits.f_to_kind(Kind::Float)?;
        if self.temperature != 1.0 {
            let _ = logits.f_mul_scalar_(1.0 / self.temperature)?;
        }
        let largest = logits.f_amax([-1], true)?;
        let mut shifted = logits.f_sub_(&largest)?;
        let token_logits = shifted.f_gather(-1, &targets.tokens, false)?;
        let at_logits = targets
            .at
            .as_ref()
            .map(|ids| shifted.f_gather(-1, ids, false))
            .transpose()?;
        let exp = match self.entropy {
            true => shifted.f_exp()?,
            false => shifted.f_exp_()?,
        };
        let sum = exp.f_sum_dim_intlist([-1i64].as_slice(), true, None::<Kind>)?; // [S', 1]
        let log_sum = sum.f_log()?;
        let entropy = match self.entropy {
            true => Some(log_sum.f_sub(&row_dots(&exp, &shifted)?.f_div(&sum)?)?),
            false => None,
        };
        Ok(Chunk {
            log_probs: token_logits.f_sub(&log_sum)?,
            log_probs_at: at_logits.map(|z| z.f_sub(&log_sum)).transpose()?,
            shifted: self.entropy.then_some(shifted),
            exp,
            sum,
            log_sum,
            entropy,
        })
    }
}

/// The dot product of each row with the other's, `[S', 1]`, in the memory of the two. Blocks of columns are added
/// in f64: one f32 sum over a whole vocabulary loses the small terms.
fn row_dots(a: &Tensor, b: &Tensor) -> Torch<Tensor> {
    const BLOCK: i64 = 512;
    let (rows, columns) = a.size2()?;
    let mut total = Tensor::f_zeros([rows, 1], (Kind::Double, a.device()))?;
    for start in (0..columns).step_by(BLOCK as usize) {
        let block = |x: &Tensor| x.f_narrow(1, start, BLOCK.min(columns - start));
        let dots = block(a)?
            .f_unsqueeze(1)?
            .f_bmm(&block(b)?.f_unsqueeze(-1)?)?;
        let _ = total.f_add_(&dots.f_view([-1, 1])?.f_to_kind(Kind::Double)?)?;
    }
    total.f_to_kind(Kind::Float)
}

impl Targets {
    fn rows(&self, (start, len): (i64, i64)) -> Torch<Self> {
        let cut = |x: &Tensor| x.f_narrow(0, start, len);
        Ok(Self {
            tokens: cut(&self.tokens)?,
            at: self.at.as_ref().map(cut).transpose()?,
        })
    }
}

/// Some rows of logits and what was made of them. At most two `[S', V]` buffers, one where no entropy is wanted.
#[derive(Debug)]
struct Chunk {
    /// z less its row's largest, where entropy is wanted, `[S', V]`.
    shifted: Option<Tensor>,
    /// Its exponential, `[S', V]`.
    exp: Tensor,
    /// Sum of the exponentials, `[S', 1]`.
    sum: Tensor,
    /// `[S', 1]`.
    log_sum: Tensor,
    /// `[S', 1]`.
    log_probs: Tensor,
    /// `[S', 1]`.
    entropy: Option<Tensor>,
    /// `[S', k]`.
    log_probs_at: Option<Tensor>,
}

impl Chunk {
    fn append_to(&self, scores: &mut TokenScores) -> Torch<()> {
        let append = |to: &mut Vec<f64>, from: &Tensor| -> Torch<()> {
            let values = from.f_contiguous()?.f_to_device(Device::Cpu)?;
            to.extend(floats(&values)?.iter().map(|&x| f64::from(x)));
            Ok(())
        };
        append(&mut scores.log_probs, &self.log_probs)?;
        if let (Some(to), Some(from)) = (&mut scores.entropy, &self.entropy) {
            append(to, from)?;
        }
        if let (Some(to), Some(from)) = (&mut scores.log_probs_at, &self.log_probs_at) {
            append(to, from)?;
        }
        Ok(())
    }

    /// The gradient of the logits, in the memory of the chunk.
    fn backward(
        self,
        targets: &Targets,
        gradients: &TokenGradients,
        temperature: f64,
    ) -> Torch<Tensor> {
        let at = gradients.log_probs_at.as_ref();
        // `a + sum_k c_k`: what every probability is pulled down by.
        let pull = match at {
            Some(at) => at
                .f_sum_dim_intlist([-1i64].as_slice(), true, None::<Kind>)?
                .f_add(&gradients.log_probs)?,
            None => gradients.log_probs.shallow_clone(),
        };
        let scale = self.sum.f_reciprocal()?.f_mul_scalar(1.0 / temperature)?;
        let mut d_logits = match (self.shifted, self.entropy, &gradients.entropy) {
            (Some(mut shifted), Some(entropy), Some(d_entropy)) => {
                // p (-b (log p + entropy) - pull)
                let _ = shifted.f_sub_(&self.log_sum.f_sub(&entropy)?)?;
                let _ = shifted.f_mul_(&d_entropy.f_neg()?)?;
                let _ = shifted.f_sub_(&pull)?;
                shifted.f_mul_(&self.exp)?.f_mul_(&scale)?
            }
            _ => {
                let mut exp = self.exp;
                exp.f_mul_(&scale.f_mul(&pull)?.f_neg()?)?
            }
        };
        let inverse = 1.0 / temperature;
        let _ = d_logits.f_scatter_add_(
            -1,
            &targets.tokens,
            &gradients.log_probs.f_mul_scalar(inverse)?,
        )?;
        if let (Some(at), Some(ids)) = (at, &targets.at) {
            let _ = d_logits.f_scatter_add_(-1, ids, &at.f_mul_scalar(inverse)?)?;
        }
        Ok(d_logits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shim;

    const OPTIONS: (Kind, Device) = (Kind::Float, Device::Cpu);

    fn wave(shape: &[i64], frequency: f64, scale: f64) -> Tensor {
        let len = shape.iter().product::<i64>();
        ((Tensor::arange(len, OPTIONS) * frequency).sin() * scale).view(shape)
    }

    fn column(values: &Tensor) -> Vec<f64> {
        Vec::<f64>::try_from(values.to_kind(Kind::Double).flatten(0, -1)).unwrap()
    }

    fn assert_close(found: &[f64], truth: &[f64], tolerance: f64, what: &str) {
        assert_eq!(found.len(), truth.len(), "{what}");
        let scale = truth.iter().fold(1.0f64, |a, b| a.max(b.abs()));
        for (f, t) in found.iter().zip(truth) {
            assert!((f - t).abs() <= tolerance * scale, "{what}: {f} for {t}");
        }
    }

    /// Scores and gradients of the head in chunks, against autograd over all rows at once in f64.
    fn check(v: i64, entropy: bool, at: bool, temperature: f64, budget_bytes: u64) {
        let _no_grad = tch::no_grad_guard();
        let (s, d, k) = (7, 5, 2);
        let hidden = wave(&[s, d], 1.3, 1.0);
        let weight = wave(&[v, d], 0.7, 2.0);
        let tokens = (Tensor::arange(s, (Kind::Int64, Device::Cpu)) * 3).remainder(v);
        let ids = (Tensor::arange(s * k, (Kind::Int64, Device::Cpu)) * 5).remainder(v);
        let targets = Targets {
            tokens: tokens.view([s, 1]),
            at: at.then(|| ids.view([s, k])),
        };
        let gradients = TokenGradients {
            log_probs: wave(&[s, 1], 2.1, 1.0),
            entropy: entropy.then(|| wave(&[s, 1], 1.7, 1.0)),
            log_probs_at: at.then(|| wave(&[s, k], 0.9, 1.0)),
        };
        let head = Head {
            weight: &weight,
            temperature,
            budget_bytes,
            entropy,
        };
        let mut d_weight = Tensor::zeros([v, d], OPTIONS);
        let (scores, d_hidden) = head
            .backward(&hidden, &targets, &gradients, &mut d_weight)
            .unwrap();
        let alone = head.score(&hidden, &targets).unwrap();
        assert_eq!(alone.log_probs, scores.log_probs);

        let leaf = |x: &Tensor| x.to_kind(Kind::Double).set_requires_grad(true);
        let (hidden, weight) = (leaf(&hidden), leaf(&weight));
        let (truth, loss) = tch::with_grad(|| {
            let logits = hidden.matmul(&weight.tr()) / temperature;
            let log_p = logits.log_softmax(-1, Kind::Double);
            let log_probs = log_p.gather(-1, &targets.tokens, false);
            let mut loss = (&log_probs * &gradients.log_probs).sum(Kind::Double);
            let entropies = -(log_p.exp() * &log_p).sum_dim_intlist(-1, true, Kind::Double);
            if let Some(d) = &gradients.entropy {
                loss += (&entropies * d).sum(Kind::Double);
            }
            let log_probs_at = targets.at.as_ref().map(|ids| log_p.gather(-1, ids, false));
            if let (Some(x), Some(d)) = (&log_probs_at, &gradients.log_probs_at) {
                loss += (x * d).sum(Kind::Double);
            }
            ((log_probs, entropies, log_probs_at), loss)
        });
        let one = Tensor::ones_like(&loss);
        let exact = shim::gradients(&[(&loss, &one)], &[&hidden, &weight]).unwrap();
        assert_close(&scores.log_probs, &column(&truth.0), 1e-6, "log_probs");
        assert_eq!(scores.entropy.is_some(), entropy);
        if let Some(found) = &scores.entropy {
            assert_close(found, &column(&truth.1), 1e-6, "entropy");
        }
        assert_eq!(scores.log_probs_at.is_some(), at);
        if let (Some(found), Some(truth)) = (&scores.log_probs_at, &truth.2) {
            assert_close(found, &column(truth), 1e-6, "log_probs_at");
        }
        assert_close(&column(&d_hidden), &column(&exact[0]), 2e-6, "d_hidden");
        assert_close(&column(&d_weight), &column(&exact[1]), 2e-6, "d_weight");
    }

    #[test]
    fn scores_and_gradients_are_autograd_s_whatever_the_chunk() {
        for (entropy, at) in [(false, false), (true, false), (false, true), (true, true)] {
            for temperature in [1.0, 0.5] {
                for budget in [0, 2 * 11 * 4 * 3, 1 << 20] {
                    check(11, entropy, at, temperature, budget);
                }
            }
        }
    }

    /// Beyond one block of columns, and not a multiple of it.
    #[test]
    fn a_large_vocabulary_loses_no_small_terms() {
        check(50_021, true, false, 0.7, 1 << 20);
    }

    #[test]
    fn chunks_stay_within_the_budget_and_cover_every_row() {
        let weight = Tensor::zeros([100, 2], OPTIONS);
        for (entropy, buffers) in [(false, 1), (true, 2)] {
            for budget_bytes in [400, 1000, 4096, 1 << 20] {
                let head = Head {
                    weight: &weight,
                    temperature: 1.0,
                    budget_bytes,
                    entropy,
                };
                let chunks: Vec<_> = head.chunks(37).collect();
                let mut next = 0;
                for (start, len) in chunks {
                    assert_eq!(start, next);
                    next += len;
                    let bytes = (len * 100 * 4 * buffers) as u64;
                    assert!(
                        bytes <= budget_bytes || len == 1,
                        "{len} rows in {budget_bytes}"
                    );
                }
                assert_eq!(next, 37);
            }
        }
    }

    #[test]
    fn uniform_logits_have_the_entropy_of_the_vocabulary() {
        let (weight, hidden) = (
            Tensor::zeros([97, 3], OPTIONS),
            Tensor::ones([2, 3], OPTIONS),
        );
        let head = Head {
            weight: &weight,
            temperature: 1.0,
            budget_bytes: 1 << 20,
            entropy: true,
        };
        let targets = Targets {
            tokens: Tensor::zeros([2, 1], (Kind::Int64, Device::Cpu)),
            at: None,
        };
        let scores = head.score(&hidden, &targets).unwrap();
        assert_close(&scores.entropy.unwrap(), &[4.574711; 2], 1e-6, "entropy");
        assert_close(&scores.log_probs, &[-4.574711; 2], 1e-6, "log_probs");
    }
}

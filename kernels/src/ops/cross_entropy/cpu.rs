//! Rows of logits: two passes forward (maximum; sums), one pass backward.

use pulp::Simd;

use super::{CrossEntropyDims, Derivatives};
use crate::Cpu;
use crate::rows::SharedMut;
use crate::simd::{LANES, exp_below_88, fma, max, max_of, sum_lanes};

pub(super) fn forward(
    cpu: Cpu,
    dims: &CrossEntropyDims,
    logits: &[f32],
    targets: &[u32],
    log_prob: &mut [f32],
    entropy: Option<&mut [f32]>,
    lse: &mut [f64],
) {
    let (log_prob, lse) = (SharedMut::new(log_prob), SharedMut::new(lse));
    let entropy = entropy.map(SharedMut::new);
    let inv_temperature = 1.0 / dims.temperature;
    cpu.for_ranges(dims.rows, 1, |rows| {
        for row in rows {
            let logits = &logits[row * dims.vocab..][..dims.vocab];
            let target = logits[targets[row] as usize];
            let stats = if entropy.is_some() {
                dispatch!(cpu, row_stats::<_, true>, logits, inv_temperature)
            } else {
                dispatch!(cpu, row_stats::<_, false>, logits, inv_temperature)
            };
            let log_sum = stats.sum.ln();
            let (inv, peak) = (f64::from(inv_temperature), f64::from(stats.peak));
            let scored = (f64::from(target) - peak) * inv - log_sum;
            // SAFETY: for_ranges hands out disjoint ranges of rows.
            unsafe {
                log_prob.range(row..row + 1)[0] = scored as f32;
                lse.range(row..row + 1)[0] = peak * inv + log_sum;
                if let Some(entropy) = &entropy {
                    let mean = stats.weighted / stats.sum;
                    entropy.range(row..row + 1)[0] = (log_sum - mean) as f32;
                }
            }
        }
    });
}

struct RowStats {
    /// The largest logit.
    peak: f32,
    /// Sum of e^d, d = (x - peak) / temperature.
    sum: f64,
    /// Sum of d e^d.
    weighted: f64,
}

#[inline(always)]
fn row_stats<S: Simd, const ENTROPY: bool>(
    simd: S,
    logits: &[f32],
    inv_temperature: f32,
) -> RowStats {
    let peak = max_of(simd, logits);
    let (chunks, rest) = logits.as_chunks::<LANES>();
    let (mut sums, mut weighted) = ([0f64; LANES], [0f64; LANES]);
    let mut add = |chunk: &[f32; LANES]| {
        for i in 0..LANES {
            let d = (chunk[i] - peak) * inv_temperature;
            let e = exp_below_88::<S>(d);
            sums[i] += f64::from(e);
            if ENTROPY {
                // d may be negative infinity where e is 0.
                weighted[i] += f64::from(e * max(d, -200.0));
            }
        }
    };
    for chunk in chunks {
        add(chunk);
    }
    if !rest.is_empty() {
        let mut last = [f32::NEG_INFINITY; LANES];
        last[..rest.len()].copy_from_slice(rest);
        add(&last);
    }
    RowStats {
        peak,
        sum: sum_lanes(sums),
        weighted: sum_lanes(weighted),
    }
}

/// The coefficients of one row's gradient: dx_j = p_j (level + slope log p_j), apart from the target.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowGradient {
    /// Subtracted from a logit: lse in units of logits, rounded; `low` is what the rounding lost.
    high: f32,
    low: f32,
    inv_temperature: f32,
    level: f32,
    slope: f32,
    target: usize,
    d_log_prob: f64,
    /// Nothing flows into this row.
    idle: bool,
}

impl RowGradient {
    /// Of row `row` of `derivatives`.
    pub(super) fn new(
        temperature: f32,
        target: u32,
        derivatives: &Derivatives<'_>,
        row: usize,
    ) -> Self {
        let inv_temperature = 1.0 / temperature;
        let inv = f64::from(inv_temperature);
        let lse = derivatives.lse[row];
        let high = (lse / inv) as f32;
        let d_log_prob = f64::from(derivatives.d_log_prob[row]);
        let (entropy, d_entropy) = derivatives.entropy.map_or((0.0, 0.0), |(entropy, d)| {
            (f64::from(entropy[row]), f64::from(d[row]))
        });
        // An entropy that nothing flows into may hold anything.
        let pull = if d_entropy == 0.0 {
            0.0
        } else {
            d_entropy * entropy
        };
        Self {
            high,
            low: (lse - f64::from(high) * inv) as f32,
            inv_temperature,
            level: (-inv * (d_log_prob + pull)) as f32,
            slope: (-inv * d_entropy) as f32,
            target: target as usize,
            d_log_prob: inv * d_log_prob,
            idle: d_log_prob == 0.0 && d_entropy == 0.0,
        }
    }

    #[inline(always)]
    fn log_p<S: Simd>(&self, x: f32) -> f32 {
        fma::<S>(x - self.high, self.inv_temperature, -self.low)
    }

    #[inline(always)]
    fn at<S: Simd>(&self, x: f32) -> f32 {
        let log_p = self.log_p::<S>(x);
        // log_p may be negative infinity where p is 0.
        exp_below_88::<S>(log_p) * fma::<S>(self.slope, max(log_p, -200.0), self.level)
    }

    /// The target's element. 1 - p is taken without cancellation, as a sure prediction has p near 1.
    #[inline(always)]
    fn at_target<S: Simd>(&self, x: f32) -> f32 {
        let log_p = f64::from(self.log_p::<S>(x));
        let entropy_part =
            f64::from(self.level) + self.d_log_prob + f64::from(self.slope) * log_p.max(-200.0);
        (-self.d_log_prob * log_p.exp_m1() + log_p.exp() * entropy_part) as f32
    }
}

pub(super) fn for_row_gradients(
    cpu: Cpu,
    dims: &CrossEntropyDims,
    targets: &[u32],
    derivatives: &Derivatives<'_>,
    f: impl Fn(usize, &RowGradient) + Sync,
) {
    cpu.for_ranges(dims.rows, 1, |rows| {
        for row in rows {
            f(
                row,
                &RowGradient::new(dims.temperature, targets[row], derivatives, row),
            );
        }
    });
}

#[inline(always)]
pub(super) fn gradient_row<S: Simd>(
    _: S,
    gradient: &RowGradient,
    logits: &[f32],
    dlogits: &mut [f32],
) {
    if gradient.idle {
        return dlogits.fill(0.0);
    }
    let target = gradient.at_target::<S>(logits[gradient.target]);
    for (d, &x) in dlogits.iter_mut().zip(logits) {
        *d = gradient.at::<S>(x);
    }
    dlogits[gradient.target] = target;
}

#[inline(always)]
pub(super) fn gradient_row_in_place<S: Simd>(_: S, gradient: &RowGradient, logits: &mut [f32]) {
    if gradient.idle {
        return logits.fill(0.0);
    }
    let target = gradient.at_target::<S>(logits[gradient.target]);
    for x in logits.iter_mut() {
        *x = gradient.at::<S>(*x);
    }
    logits[gradient.target] = target;
}

//! Rows of logits: two passes forward (maximum; sums), one pass backward.

use pulp::Simd;

use super::{CrossEntropyDims, Derivatives, PARTIALS};
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
    cpu.for_ranges(dims.rows, 1, |rows| {
        for row in rows {
            let stats = row_partial(cpu, dims, logits, targets, entropy.is_some(), row);
            let scored = combine_row(std::iter::once(stats));
            // SAFETY: for_ranges hands out disjoint ranges of rows.
            unsafe {
                log_prob.range(row..row + 1)[0] = scored.log_prob;
                lse.range(row..row + 1)[0] = scored.lse;
                if let Some(entropy) = &entropy {
                    entropy.range(row..row + 1)[0] = scored.entropy;
                }
            }
        }
    });
}

pub(super) fn forward_partial(
    cpu: Cpu,
    dims: &CrossEntropyDims,
    logits: &[f32],
    targets: &[u32],
    entropy: bool,
    partials: &mut [f64],
) {
    let partials = SharedMut::new(partials);
    cpu.for_ranges(dims.rows, 1, |rows| {
        for row in rows {
            let partial = row_partial(cpu, dims, logits, targets, entropy, row);
            // SAFETY: for_ranges hands out disjoint ranges of rows.
            let to = unsafe { partials.range(row * PARTIALS..(row + 1) * PARTIALS) };
            to.copy_from_slice(&partial);
        }
    });
}

pub(super) fn combine(
    rows: usize,
    partials: &[f64],
    log_prob: &mut [f32],
    mut entropy: Option<&mut [f32]>,
    lse: &mut [f64],
) {
    let (partials, _) = partials.as_chunks::<PARTIALS>();
    for row in 0..rows {
        let scored = combine_row(partials[row..].iter().step_by(rows).copied());
        log_prob[row] = scored.log_prob;
        lse[row] = scored.lse;
        if let Some(entropy) = &mut entropy {
            entropy[row] = scored.entropy;
        }
    }
}

struct Scored {
    log_prob: f32,
    entropy: f32,
    lse: f64,
}

/// Of the partial results of one row, shard by shard.
fn combine_row(shards: impl Iterator<Item = [f64; PARTIALS]> + Clone) -> Scored {
    let largest = |of: fn(&[f64; PARTIALS]) -> f64| {
        let values = shards.clone().map(|shard| of(&shard));
        values.fold(f64::NEG_INFINITY, f64::max)
    };
    let (peak, target) = (largest(|shard| shard[0]), largest(|shard| shard[3]));
    let (mut sum, mut weighted) = (0.0, 0.0);
    for [shard_peak, shard_sum, shard_weighted, _] in shards {
        // Where nothing can occur there is no peak to shift from. NaN sums go on and spoil the row.
        if shard_sum == 0.0 {
            continue;
        }
        let shift = shard_peak - peak;
        let share = shift.exp();
        sum += share * shard_sum;
        if share > 0.0 {
            weighted += share * (shard_weighted + shift * shard_sum);
        }
    }
    let log_sum = sum.ln();
    Scored {
        log_prob: (target - peak - log_sum) as f32,
        entropy: (log_sum - weighted / sum) as f32,
        lse: peak + log_sum,
    }
}

fn row_partial(
    cpu: Cpu,
    dims: &CrossEntropyDims,
    logits: &[f32],
    targets: &[u32],
    entropy: bool,
    row: usize,
) -> [f64; PARTIALS] {
    let logits = &logits[row * dims.columns..][..dims.columns];
    let inv_temperature = 1.0 / dims.temperature;
    let stats = if entropy {
        dispatch!(cpu, row_stats::<_, true>, logits, inv_temperature)
    } else {
        dispatch!(cpu, row_stats::<_, false>, logits, inv_temperature)
    };
    // Products of two f32 are exact in f64.
    let scaled = |x: f32| f64::from(x) * f64::from(inv_temperature);
    let target = dims
        .column(targets[row])
        .map(|column| scaled(logits[column]));
    [
        scaled(stats.peak),
        stats.sum,
        stats.weighted,
        target.unwrap_or(f64::NEG_INFINITY),
    ]
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
    if peak == f32::NEG_INFINITY {
        // No column can occur, or there are none, or some are NaN.
        let sum = if logits.iter().any(|x| x.is_nan()) {
            f64::NAN
        } else {
            0.0
        };
        return RowStats {
            peak,
            sum,
            weighted: 0.0,
        };
    }
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
    /// The target's column, if it is one of these.
    target: Option<usize>,
    d_log_prob: f64,
    /// Nothing flows into this row.
    idle: bool,
}

impl RowGradient {
    /// Of row `row` of `derivatives`.
    pub(super) fn new(
        dims: &CrossEntropyDims,
        target: u32,
        derivatives: &Derivatives<'_>,
        row: usize,
    ) -> Self {
        let inv_temperature = 1.0 / dims.temperature;
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
            target: dims.column(target),
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

pub(super) fn backward(
    cpu: Cpu,
    dims: &CrossEntropyDims,
    logits: &[f32],
    targets: &[u32],
    derivatives: &Derivatives<'_>,
    dlogits: &mut [f32],
) {
    let dlogits = SharedMut::new(dlogits);
    for_row_gradients(cpu, dims, targets, derivatives, |row, gradient| {
        let span = row * dims.columns..(row + 1) * dims.columns;
        // SAFETY: every row is visited once.
        let out = unsafe { dlogits.range(span.clone()) };
        dispatch!(cpu, gradient_row, gradient, &logits[span], out);
    });
}

pub(super) fn backward_in_place(
    cpu: Cpu,
    dims: &CrossEntropyDims,
    logits: &mut [f32],
    targets: &[u32],
    derivatives: &Derivatives<'_>,
) {
    let logits = SharedMut::new(logits);
    for_row_gradients(cpu, dims, targets, derivatives, |row, gradient| {
        // SAFETY: every row is visited once.
        let out = unsafe { logits.range(row * dims.columns..(row + 1) * dims.columns) };
        dispatch!(cpu, gradient_row_in_place, gradient, out);
    });
}

fn for_row_gradients(
    cpu: Cpu,
    dims: &CrossEntropyDims,
    targets: &[u32],
    derivatives: &Derivatives<'_>,
    f: impl Fn(usize, &RowGradient) + Sync,
) {
    cpu.for_ranges(dims.rows, 1, |rows| {
        for row in rows {
            f(row, &RowGradient::new(dims, targets[row], derivatives, row));
        }
    });
}

#[inline(always)]
fn gradient_row<S: Simd>(_: S, gradient: &RowGradient, logits: &[f32], dlogits: &mut [f32]) {
    if gradient.idle {
        return dlogits.fill(0.0);
    }
    let target = gradient
        .target
        .map(|column| (column, gradient.at_target::<S>(logits[column])));
    for (d, &x) in dlogits.iter_mut().zip(logits) {
        *d = gradient.at::<S>(x);
    }
    if let Some((column, target)) = target {
        dlogits[column] = target;
    }
}

#[inline(always)]
fn gradient_row_in_place<S: Simd>(_: S, gradient: &RowGradient, logits: &mut [f32]) {
    if gradient.idle {
        return logits.fill(0.0);
    }
    let target = gradient
        .target
        .map(|column| (column, gradient.at_target::<S>(logits[column])));
    for x in logits.iter_mut() {
        *x = gradient.at::<S>(*x);
    }
    if let Some((column, target)) = target {
        logits[column] = target;
    }
}

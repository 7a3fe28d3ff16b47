//! Losses made to show faults: every derivative that an engine carries back depends on what it computed.

use drivetrain_core::{
    Error, ErrorKind, Result,
    batch::{Batch, BatchTotals},
    metrics::Metrics,
    objective::{Objective, ObjectiveValue, Requirements, TokenOutputs},
};

/// Name of the per-token column of weights that [`Polynomial`] reads.
pub const WEIGHTS: &str = "conformance_weights";

/// Name of the per-token column of ids `[T, k]` that [`Polynomial`] may read.
pub const IDS: &str = "conformance_ids";

/// `sum_t w_t (l + l^2 / 4 + h - h^2 / 8 + sum_k a_k (k + 1) / 8) / tokens` over scored tokens, of log-prob l,
/// entropy h, log-probs at ids a.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Polynomial {
    /// Divides the logits.
    pub temperature: f64,
    /// Whether it reads entropy.
    pub entropy: bool,
    /// Whether it reads log-probs at the ids of [`IDS`].
    pub at_ids: bool,
}

impl Objective for Polynomial {
    fn name(&self) -> &str {
        "polynomial"
    }

    fn requires(&self) -> Requirements {
        Requirements {
            temperature: self.temperature,
            entropy: self.entropy,
            log_probs_at: self.at_ids.then(|| IDS.to_owned()),
            columns: vec![WEIGHTS.to_owned()],
            ..Requirements::default()
        }
    }

    fn evaluate(
        &self,
        microbatch: &Batch,
        outputs: &TokenOutputs,
        totals: &BatchTotals,
    ) -> Result<ObjectiveValue> {
        let weights = microbatch.column(WEIGHTS).map(|c| c.to_f64());
        let weights = weights.unwrap_or_default();
        let num_tokens = microbatch.num_tokens();
        let mut value = ObjectiveValue {
            d_log_probs: vec![0.0; num_tokens],
            d_entropy: self.entropy.then(|| vec![0.0; num_tokens]),
            ..ObjectiveValue::default()
        };
        let k = match microbatch.column(IDS) {
            Some(column) if self.at_ids => column.width(),
            _ => 0,
        };
        let mut d_at = vec![0.0; num_tokens * k];
        let divisor = totals.tokens.max(1) as f64;
        let mut sum = 0.0;
        for (t, _) in microbatch.scored().iter().enumerate().filter(|(_, s)| **s) {
            let w = weights[t] / divisor;
            let l = outputs.log_probs[t];
            sum += w * (l + l * l / 4.0);
            value.d_log_probs[t] = w * (1.0 + l / 2.0);
            if let (Some(entropy), Some(d)) = (&outputs.entropy, &mut value.d_entropy) {
                let h = entropy[t];
                sum += w * (h - h * h / 8.0);
                d[t] = w * (1.0 - h / 4.0);
            }
            if let Some(at) = outputs.log_probs_at.as_ref().filter(|_| k > 0) {
                for i in 0..k {
                    let slope = w * (i + 1) as f64 / 8.0;
                    sum += slope * at[t * k + i];
                    d_at[t * k + i] = slope;
                }
            }
        }
        value.loss = sum;
        value.d_log_probs_at = self.at_ids.then_some(d_at);
        value.metrics = Metrics::default();
        value.metrics.mean("polynomial", sum, divisor);
        if sum.is_finite() {
            return Ok(value);
        }
        Err(Error::new(
            ErrorKind::NonFinite,
            "polynomial",
            "a scored slot is not finite",
        ))
    }
}

/// Name of the per-sequence column that says where [`Poisoned`] strikes.
pub const POISON: &str = "conformance_poison";

/// Another loss whose derivative is infinite at the scored tokens of the sequences that [`POISON`] marks.
#[derive(Debug)]
pub struct Poisoned<'a>(pub &'a dyn Objective);

impl Objective for Poisoned<'_> {
    fn name(&self) -> &str {
        "poisoned"
    }

    fn requires(&self) -> Requirements {
        self.0.requires()
    }

    fn evaluate(
        &self,
        microbatch: &Batch,
        outputs: &TokenOutputs,
        totals: &BatchTotals,
    ) -> Result<ObjectiveValue> {
        let mut value = self.0.evaluate(microbatch, outputs, totals)?;
        let marked = microbatch.column(POISON).map(|c| c.to_f64());
        for (s, mark) in marked.unwrap_or_default().into_iter().enumerate() {
            for t in microbatch.sequence(s).filter(|_| mark != 0.0) {
                if value.d_log_probs[t] != 0.0 {
                    value.d_log_probs[t] = f64::INFINITY;
                }
            }
        }
        Ok(value)
    }
}

/// Another loss that fails with this kind, where it is told to.
#[derive(Debug)]
pub struct Failing<'a>(pub &'a dyn Objective, pub Option<ErrorKind>);

impl Objective for Failing<'_> {
    fn name(&self) -> &str {
        "failing"
    }

    fn requires(&self) -> Requirements {
        self.0.requires()
    }

    fn evaluate(
        &self,
        microbatch: &Batch,
        outputs: &TokenOutputs,
        totals: &BatchTotals,
    ) -> Result<ObjectiveValue> {
        match self.1 {
            Some(kind) => Err(Error::new(
                kind,
                "failing",
                "the objective was told to fail",
            )),
            None => self.0.evaluate(microbatch, outputs, totals),
        }
    }
}

/// Another loss, watched: the sums of the magnitudes of its derivatives, which say how errors of its inputs
/// become errors of the loss.
#[derive(Debug)]
pub struct Watched<'a> {
    inner: &'a dyn Objective,
    slopes: std::sync::Mutex<(f64, f64)>,
}

impl<'a> Watched<'a> {
    /// Watches a loss.
    pub fn new(inner: &'a dyn Objective) -> Self {
        Self {
            inner,
            slopes: std::sync::Mutex::default(),
        }
    }

    /// Sums of `abs(d loss / d log_prob)` (at ids included) and `abs(d loss / d entropy)` so far.
    pub fn slopes(&self) -> (f64, f64) {
        let slopes = self.slopes.lock();
        *slopes.unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Objective for Watched<'_> {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn requires(&self) -> Requirements {
        self.inner.requires()
    }

    fn prepare(&self, global: &mut Batch, totals: &mut BatchTotals) -> Result<()> {
        self.inner.prepare(global, totals)
    }

    fn evaluate(
        &self,
        microbatch: &Batch,
        outputs: &TokenOutputs,
        totals: &BatchTotals,
    ) -> Result<ObjectiveValue> {
        let value = self.inner.evaluate(microbatch, outputs, totals)?;
        let sum = |d: &[f64]| d.iter().map(|d| d.abs()).sum::<f64>();
        let optional = |d: &Option<Vec<f64>>| d.as_deref().map_or(0.0, sum);
        let mut slopes = self
            .slopes
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        slopes.0 += sum(&value.d_log_probs) + optional(&value.d_log_probs_at);
        slopes.1 += optional(&value.d_entropy);
        Ok(value)
    }
}

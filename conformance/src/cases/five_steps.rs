//! Five steps of training on a fixture: what the oracle makes of them, how far an engine may be from it, and
//! the comparison. The oracle's part is computed once for each fixture and shared by all cases.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use drivetrain_core::{
    DType, Result,
    batch::Batch,
    config::OptimizerConfig,
    model::ModelSpec,
    moe::{LOAD_BALANCING_LOSS, ROUTER_Z_LOSS},
    objective::Nll,
    optim::is_trained,
    weights::MemoryWeights,
};

use super::step::{Setting, oracle};
use crate::{
    compare::Bound,
    fixture::{batches, model},
    objective::Watched,
    suite::{Findings, Layout, Subject},
    tolerance::{Tensors, Tolerances, WEIGHT_FLOOR, weights_after},
    train::{Trace, Training, tensors},
};

/// Number of steps.
pub(super) const STEPS: usize = 5;

/// The training, and where it should end.
pub(super) struct FiveSteps {
    pub(super) model: ModelSpec,
    pub(super) weights: MemoryWeights,
    pub(super) batches: Vec<Batch>,
    /// The oracle's.
    pub(super) exact: Trace,
    tolerances: Tolerances,
    /// Sum of the magnitudes of the loss's derivatives.
    slope: f64,
    /// Of each weight at the end.
    bounds: Tensors,
}

/// Fixture, what its job says of experts, seed, and dtype.
type Key = (String, String, u64, DType);

type Cache = Mutex<BTreeMap<Key, Arc<FiveSteps>>>;

static CACHE: Cache = Mutex::new(BTreeMap::new());

/// Clipping at work, decay at work.
pub(super) fn optimizer() -> OptimizerConfig {
    OptimizerConfig {
        learning_rate: 1e-3,
        max_grad_norm: Some(0.5),
        ..OptimizerConfig::default()
    }
}

impl FiveSteps {
    /// Of a fixture, for an engine that computes as the subject does.
    pub(super) fn of(name: &str, subject: &Subject) -> Result<Arc<Self>> {
        let moe = format!("{:?}", subject.moe);
        let key = (
            name.to_owned(),
            moe,
            subject.settings.seed,
            subject.compute(),
        );
        let lock = || CACHE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = lock().get(&key) {
            return Ok(known.clone());
        }
        let new = Arc::new(Self::new(model(name), subject)?);
        Ok(lock().entry(key).or_insert(new).clone())
    }

    fn new(model: ModelSpec, subject: &Subject) -> Result<Self> {
        let seed = subject.settings.seed;
        let setting = Setting::new(&model, seed)?;
        let batch = |n| batches::eight(model.vocab_size, seed + n as u64);
        let batches: Vec<_> = (0..STEPS).map(batch).collect::<Result<_>>()?;
        let nll = Nll::default();
        let watched = Watched::new(&nll);
        setting.step(&oracle(subject), &batches[0], &watched, Layout::default())?;
        let mut tolerances = setting.tolerances(subject, &batches[0], 1.0)?;
        for batch in &batches[1..] {
            let next = setting.tolerances(subject, batch, 1.0)?;
            tolerances.log_prob = tolerances.log_prob.max(next.log_prob);
            tolerances.gradient = tolerances.gradient.max(next.gradient);
        }
        let mut five = Self {
            weights: setting.weights,
            batches,
            exact: Trace::default(),
            tolerances,
            slope: watched.slopes().0,
            bounds: Tensors::new(),
            model,
        };
        five.exact = five.train(
            &oracle(subject),
            Layout::default(),
            &mut Findings::default(),
        )?;
        let start = tensors(&five.weights);
        let (parameters, steps) = (five.model.parameters(), &five.exact.steps);
        five.bounds = weights_after(&parameters, &optimizer(), &start, steps, &five.tolerances);
        let job = subject.job(&five.model).config;
        for spec in parameters.iter().filter(|spec| !is_trained(&job, spec)) {
            five.bounds[&spec.name].fill(0.0);
        }
        Ok(five)
    }

    /// The training under a backend and layout.
    pub(super) fn train(
        &self,
        subject: &Subject,
        layout: Layout,
        findings: &mut Findings,
    ) -> Result<Trace> {
        let training = Training {
            model: &self.model,
            weights: &self.weights,
            batches: &self.batches,
            objective: &Nll::default(),
            optimizer: optimizer(),
            layout,
        };
        training.run(subject, findings)
    }

    /// Routing: whether the fixture is far enough from ties, how many tokens each expert got, and the router's losses
    /// at the first step.
    fn check_routing(&self, found: &Trace, expected: &Trace, times: f64, findings: &mut Findings) {
        if self.model.moe.is_none() {
            return;
        }
        for metrics in &self.exact.metrics {
            self.tolerances.check_margin(metrics, findings);
        }
        // A training that was pieced together is not asked.
        if found.metrics.len() != STEPS {
            return;
        }
        let same = found.expert_tokens == self.exact.expert_tokens;
        findings.fact("every expert got as many tokens as the oracle's", same);
        for name in [LOAD_BALANCING_LOSS, ROUTER_Z_LOSS] {
            let of = |trace: &Trace| trace.metrics[0].value(name);
            let (found, exact) = (of(found), of(expected));
            if found.is_some() || exact.is_some() {
                let exact = exact.unwrap_or(f64::NAN);
                let tolerance = times * self.tolerances.router_loss(exact);
                let found = found.unwrap_or(f64::NAN);
                findings.number(name, "step 0", found, exact, tolerance);
            }
        }
    }

    /// Beside the oracle.
    pub(super) fn check(&self, found: &Trace, findings: &mut Findings) {
        self.check_beside(found, &self.exact, 1.0, findings);
    }

    /// Beside another engine; `times` is how many of the two may be off by their tolerance.
    pub(super) fn check_beside(
        &self,
        found: &Trace,
        expected: &Trace,
        times: f64,
        findings: &mut Findings,
    ) {
        // Weights differ by their tolerance, mostly its floor: the loss moves by the gradient times that.
        let drift = WEIGHT_FLOOR * (self.model.num_parameters() as f64).sqrt();
        let as_many = found.losses.len() == STEPS && expected.losses.len() == STEPS;
        findings.fact("all steps were taken", as_many);
        if !as_many {
            return;
        }
        self.check_routing(found, expected, times, findings);
        if let (Some(found), Some(expected)) = (&found.log_probs, &expected.log_probs) {
            let bound = Bound::Uniform(times * self.tolerances.log_prob);
            findings.check("log_probs", "", found, expected, bound);
        }
        // Later steps' are of weights that differ.
        let (first, other) = (&found.steps[0].gradients, &expected.steps[0].gradients);
        if !first.is_empty() && !other.is_empty() {
            let bounds = self.tolerances.gradients(&self.exact.steps[0].gradients);
            for (name, expected) in other {
                let found = first.get(name).map(Vec::as_slice).unwrap_or_default();
                let bound = Bound::Uniform(times * bounds[name]);
                findings.check("gradient", name, found, expected, bound);
            }
        }
        for (n, step) in self.exact.steps.iter().enumerate() {
            let of = format!("step {n}");
            let moved = n as f64 * drift * self.exact.grad_norms[n];
            let tolerance = times * (self.tolerances.log_prob * self.slope + moved);
            let (loss, other) = (found.losses[n], expected.losses[n]);
            findings.number("loss", &of, loss, other, tolerance);
            let tolerance = times * (self.tolerances.grad_norm(&step.gradients) + moved);
            let (norm, other) = (found.grad_norms[n], expected.grad_norms[n]);
            findings.number("grad_norm", &of, norm, other, tolerance);
            let (found, expected) = (&found.steps[n], &expected.steps[n]);
            let tolerance = tolerance / other.max(f64::MIN_POSITIVE);
            let (factor, other) = (found.clip_factor, expected.clip_factor);
            findings.number("clip_factor", &of, factor, other, tolerance);
            let (rate, other) = (found.learning_rate, expected.learning_rate);
            findings.number("learning_rate", &of, rate, other, 0.0);
        }
        for (name, expected) in &expected.weights {
            let found = found.weights.get(name).map(Vec::as_slice);
            let bounds: Vec<_> = self.bounds[name].iter().map(|b| b * times).collect();
            let bound = Bound::Each(&bounds);
            findings.check("weights", name, found.unwrap_or_default(), expected, bound);
        }
        let known = found.weights.len() == self.exact.weights.len();
        findings.fact("every weight is of a known parameter", known);
    }
}

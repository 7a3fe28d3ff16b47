//! How far a right engine may be from the exact value: one table, derived.
//!
//! | quantity | tolerance | from |
//! |---|---|---|
//! | golden log-probs | `1e-5` | given; transformers' own f32 run is up to 5e-6 from its f64 run |
//! | golden gradients | `2e-6` of each tensor's largest magnitude | given; transformers' f32 run: 3e-7 absolute |
//! | log-probs | `u sqrt(path)` of the largest magnitude, at least 1, and `u sqrt(V)` | rounding errors add like a random walk along the chain of dot products (Higham and Mary 2019); the sum over the vocabulary is of positive terms, and the logarithm turns its relative error into an absolute one |
//! | gradients | `u sqrt(3 (path + V)) sqrt(2 ln N)` of the largest magnitude in the tensor's layer | forward, backward and the product that makes the gradient; the worst of N elements, all parameters', is that many standard deviations out; rounding is relative to what flows through the layer, of which a tensor's own gradient may be a small difference (softmax's backward subtracts: q and k of a sequence of one scored token get exactly 0) |
//! | gradients where activations are saved in a shorter dtype | that, and `v sqrt(kept) sqrt(2 ln N)` of the same magnitude | arithmetic and forward are as before; each kept value is rounded once, by `v` of itself at most, each its own way; a sum of products of rounded factors is off by as much as one of them, however long it is; `kept` factors are in series |
//! | such a gradient's length along the exact one, over its length | `v sqrt(kept / scored)` | rounding to nearest is up as often as down, so that what the tokens make of it averages out; cutting off would shrink every factor by 0.7 `v` on average |
//! | entropy | log-probs' times `ln V` | `dH = -sum p (log p + H) d logit`, and `log p + H` averages below `ln V` |
//! | nearest choice of experts | 4 times a log-prob's, at least | a choice changes where two router logits cross, each of which is off as those of the head are, to which they are on the way; relative to the largest of its token; 4 for "far" |
//! | router losses | twice a log-prob's of the loss, or of its root for the z-loss, a square | softmax values are off by up to twice a logit's error, relative |
//! | loss | log-probs' times the sum of `abs(d loss / d log_prob)`, entropy's likewise | the chain rule |
//! | grad_norm | 2-norm of the gradients' tolerances, over all elements | the triangle inequality |
//! | weights after n steps | per element, the largest of `1e-6`, `2 n u` of its magnitude, and 4 times the shift of the oracle's own weight when its gradient moves by its tolerance | Adam divides by tiny gradients: a flat bound would be a lottery; a step rounds a weight when it decays and when it moves |
//! | layouts of one engine | gradients `1e-5` relative | given |
//! | same engine, same layout | equal bits | determinism |
//!
//! `u` is the unit roundoff of the compute dtype, `v` that of saved activations; `kept` is the number of activations
//! that a gradient meets one after the other on its way from the logits to the tokens, `scored` the number of scored
//! tokens; `path` is the sum of the lengths of the dot products in
//! series from the tokens to a logit, `V` the vocabulary's size.

use drivetrain_core::{
    DType,
    config::OptimizerConfig,
    metrics::Metrics,
    model::{MlpSpec, ModelSpec, ParameterSpec},
};
use indexmap::IndexMap;

use crate::{
    compare::largest,
    oracle::{Element, ROUTER_MARGIN, StepSize},
    suite::Findings,
};

/// Smallest tolerance of a weight after some steps.
pub const WEIGHT_FLOOR: f64 = 1e-6;

/// How many times the oracle's shift a weight may be off.
pub const WEIGHT_SHIFTS: f64 = 4.0;

/// Gradients of one engine in two layouts, relative to each tensor's largest magnitude.
pub const BETWEEN_LAYOUTS: f64 = 1e-5;

/// Values by parameter.
pub type Tensors = IndexMap<String, Vec<f64>>;

/// The tolerances of one comparison.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tolerances {
    /// Of a log-prob, absolute.
    pub log_prob: f64,
    /// Of an entropy, absolute.
    pub entropy: f64,
    /// Of a gradient, relative to the largest magnitude of its tensor.
    pub gradient: f64,
    /// Whether that magnitude is the largest of any tensor in the same layer.
    pub by_layer: bool,
    /// Of a weight in one step, relative to it: it is rounded when it decays and when it moves.
    pub weight_step: f64,
}

impl Tolerances {
    /// Against the golden files.
    pub fn golden(model: &ModelSpec) -> Self {
        Self {
            log_prob: 1e-5,
            entropy: 1e-5 * log_vocab(model),
            gradient: 2e-6,
            by_layer: false,
            weight_step: 2.0 * unit_roundoff(DType::F32),
        }
    }

    /// Against the oracle, for an engine that computes in `compute`. `magnitude` is the largest log-prob's.
    pub fn derived(model: &ModelSpec, compute: DType, longest: usize, magnitude: f64) -> Self {
        let (u, path) = (unit_roundoff(compute), path(model, longest) as f64);
        let vocab = model.vocab_size as f64;
        let log_prob = u * (path.sqrt() * magnitude.max(1.0) + vocab.sqrt());
        Self {
            log_prob,
            entropy: log_prob * log_vocab(model),
            gradient: u * (3.0 * (path + vocab)).sqrt() * worst_of(model.num_parameters()),
            by_layer: true,
            // Masters have at least f32.
            weight_step: 2.0 * u.min(unit_roundoff(DType::F32)),
        }
    }

    /// Against the oracle, for an engine whose activations and whose weights in products are in a shorter `dtype`: sums,
    /// softmax, the statistics of norms and the loss are in f32, and what comes of each is rounded once.
    pub fn rounded(model: &ModelSpec, dtype: DType, magnitude: f64) -> Self {
        // An activation, and the weight that it meets.
        let (v, in_series) = (unit_roundoff(dtype), 2.0 * kept(model) as f64);
        let log_prob = v * in_series.sqrt() * magnitude.max(1.0);
        Self {
            log_prob,
            entropy: log_prob * log_vocab(model),
            gradient: v * (3.0 * in_series).sqrt() * worst_of(model.num_parameters()),
            by_layer: true,
            weight_step: 2.0 * unit_roundoff(DType::F32),
        }
    }

    /// The same for an engine that reduces gradients in `dtype`: each rank's is rounded, and their sum.
    #[must_use]
    pub fn reduced_in(self, dtype: DType) -> Self {
        Self {
            gradient: self.gradient + 2.0 * unit_roundoff(dtype),
            ..self
        }
    }

    /// The same for an engine that keeps activations for backward in `dtype`.
    #[must_use]
    pub fn saved_in(self, dtype: DType, model: &ModelSpec) -> Self {
        let rounding = unit_roundoff(dtype) * (kept(model) as f64).sqrt();
        Self {
            gradient: self.gradient + rounding * worst_of(model.num_parameters()),
            ..self
        }
    }

    /// Routing is discrete: nothing that depends on it can be compared unless every choice of experts is far enough
    /// from another one. `metrics` are the oracle's, of a batch that is compared; without experts there is no choice.
    pub fn check_margin(&self, metrics: &Metrics, findings: &mut Findings) {
        if let Some(margin) = metrics.value(ROUTER_MARGIN) {
            let of = "beside the nearest choice of experts (another seed may draw one further off)";
            findings.number("rounding", of, self.margin(), 0.0, margin);
        }
    }

    /// How near to another a choice of experts may be, relative to what its scores are rounded by.
    pub fn margin(&self) -> f64 {
        4.0 * self.log_prob
    }

    /// Of the load-balancing loss or the z-loss of this exact value, both without their coefficients.
    pub fn router_loss(&self, exact: f64) -> f64 {
        2.0 * self.log_prob * larger(exact, exact.sqrt())
    }

    /// Between two engines that are each this far from the exact value.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            log_prob: self.log_prob + other.log_prob,
            entropy: self.entropy + other.entropy,
            gradient: self.gradient + other.gradient,
            by_layer: self.by_layer,
            weight_step: self.weight_step + other.weight_step,
        }
    }

    /// The tolerance of each parameter's gradient, absolute.
    pub fn gradients(&self, exact: &Tensors) -> IndexMap<String, f64> {
        let magnitude = |(name, values): (&String, &Vec<f64>)| (name.clone(), largest(values));
        self.gradients_of(&exact.iter().map(magnitude).collect())
    }

    /// The same, where only each tensor's largest magnitude is known.
    pub fn gradients_of(&self, magnitudes: &IndexMap<String, f64>) -> IndexMap<String, f64> {
        let mut scales: IndexMap<&str, f64> = IndexMap::new();
        for (name, &magnitude) in magnitudes {
            let scale = scales.entry(self.group(name)).or_default();
            *scale = larger(magnitude, *scale);
        }
        let of = |name: &String| (name.clone(), self.gradient * scales[self.group(name)]);
        magnitudes.keys().map(of).collect()
    }

    fn group<'a>(&self, name: &'a str) -> &'a str {
        if self.by_layer { layer(name) } else { name }
    }

    /// The tolerance of the gradient's norm, absolute.
    pub fn grad_norm(&self, exact: &Tensors) -> f64 {
        let tolerances = self.gradients(exact);
        let squares = exact
            .iter()
            .map(|(name, values)| values.len() as f64 * tolerances[name].powi(2));
        squares.sum::<f64>().sqrt()
    }
}

/// What tells a layer's tensors from all others; the whole name of a tensor that is in none.
fn layer(name: &str) -> &str {
    let after = name.strip_prefix("model.layers.");
    match after.and_then(|rest| rest.split_once('.')) {
        Some((_, within)) => &name[..name.len() - within.len()],
        None => name,
    }
}

/// Half the distance from 1 to the next number.
pub fn unit_roundoff(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::EPSILON / 2.0,
        DType::Bf16 => 2.0_f64.powi(-8),
        DType::F16 => 2.0_f64.powi(-11),
        _ => f64::from(f32::EPSILON) / 2.0,
    }
}

fn log_vocab(model: &ModelSpec) -> f64 {
    (model.vocab_size as f64).ln().max(1.0)
}

/// How many standard deviations out the largest of `n` random walks is expected.
fn worst_of(n: usize) -> f64 {
    (2.0 * (n as f64).ln()).sqrt().max(1.0)
}

/// Lengths of the dot products (and sums) in series from a token to a logit.
fn path(model: &ModelSpec, longest: usize) -> usize {
    let (d, e) = (model.hidden_size, model.head_dim);
    let layers = model.layers.iter().map(|layer| {
        let feed_forward = match (layer.mlp, model.moe) {
            (MlpSpec::Dense { ffn_size }, _) => d + ffn_size,
            (MlpSpec::Moe, Some(moe)) => d + moe.num_experts + d + moe.ffn_size,
            (MlpSpec::Moe, None) => 0,
        };
        let attention = d + e + longest + model.num_heads * e;
        let norms = 2 * d + if model.qk_norm { e } else { 0 };
        norms + attention + feed_forward
    });
    layers.sum::<usize>() + 2 * d
}

/// Activations that a gradient meets one after the other from the logits to the tokens.
fn kept(model: &ModelSpec) -> usize {
    let layers = model.layers.iter().map(|layer| {
        // The stream and its norm; q, k and v, normed too or not; what attention makes.
        let attention = 2 + 3 + if model.qk_norm { 2 } else { 0 } + 1;
        // The stream and its norm; gate, up and their product; what comes to experts and what they make.
        let feed_forward = match layer.mlp {
            MlpSpec::Dense { .. } => 2 + 3,
            MlpSpec::Moe => 2 + 3 + 2,
        };
        attention + feed_forward
    });
    layers.sum()
}

/// How far from 1 the length along the exact gradient may be, over its length, of a gradient over `scored` tokens, where
/// activations are kept in `dtype`.
pub fn along(dtype: DType, model: &ModelSpec, scored: usize) -> f64 {
    unit_roundoff(dtype) * (kept(model) as f64 / scored.max(1) as f64).sqrt()
}

/// One optimizer step of the oracle, as far as a weight's way through it depends on it.
#[derive(Debug, Clone)]
pub struct StepRecord {
    /// Exact gradients, before clipping.
    pub gradients: Tensors,
    /// What they were multiplied by.
    pub clip_factor: f64,
    /// Learning rate.
    pub learning_rate: f64,
}

/// The tolerance of every weight after these steps of the oracle, element by element.
pub fn weights_after(
    parameters: &[ParameterSpec],
    optimizer: &OptimizerConfig,
    start: &Tensors,
    steps: &[StepRecord],
    tolerances: &Tolerances,
) -> Tensors {
    let moved: Vec<_> = steps
        .iter()
        .map(|step| tolerances.gradients(&step.gradients))
        .collect();
    let of_parameter = |spec: &ParameterSpec| {
        let name = spec.name.as_str();
        let steps: Vec<_> = steps
            .iter()
            .zip(&moved)
            .map(|(step, moved)| TensorStep {
                gradient: &step.gradients[name],
                moved: moved[name],
                clip_factor: step.clip_factor,
                learning_rate: step.learning_rate,
            })
            .collect();
        let bounds = weight_after(spec, optimizer, &start[name], &steps, tolerances);
        (spec.name.clone(), bounds)
    };
    parameters.iter().map(of_parameter).collect()
}

/// One optimizer step of one tensor.
#[derive(Debug, Clone, Copy)]
pub struct TensorStep<'a> {
    /// Its exact gradient, before clipping.
    pub gradient: &'a [f64],
    /// That gradient's tolerance.
    pub moved: f64,
    /// What it was multiplied by.
    pub clip_factor: f64,
    /// Learning rate.
    pub learning_rate: f64,
}

/// The tolerance of each weight of one tensor: AdamW is run again with each step's gradient moved up or down by its
/// tolerance, in every combination, and the largest shift counts.
pub fn weight_after(
    spec: &ParameterSpec,
    optimizer: &OptimizerConfig,
    start: &[f64],
    steps: &[TensorStep<'_>],
    tolerances: &Tolerances,
) -> Vec<f64> {
    let sizes = (1..)
        .zip(steps)
        .map(|(count, step)| StepSize::new(optimizer, spec, step.learning_rate, count));
    let steps: Vec<_> = sizes.zip(steps).collect();
    let end = |element: usize, sign: &dyn Fn(usize) -> f64| {
        let mut x = Element {
            weight: start[element],
            exp_avg: 0.0,
            exp_avg_sq: 0.0,
        };
        for (n, (size, step)) in steps.iter().enumerate() {
            let g = step.gradient[element] + sign(n) * step.moved;
            size.update(&mut x, g * step.clip_factor, None);
        }
        x.weight
    };
    let tolerance = |element| {
        let exact = end(element, &|_| 0.0);
        let up_or_down = |signs: usize, n| if signs >> n & 1 == 1 { 1.0 } else { -1.0 };
        let shift = |signs| (end(element, &|n| up_or_down(signs, n)) - exact).abs();
        let largest = (0..1usize << steps.len()).map(shift).fold(0.0, larger);
        let rounding = steps.len() as f64 * tolerances.weight_step * exact.abs();
        larger(WEIGHT_SHIFTS * largest, WEIGHT_FLOOR.max(rounding))
    };
    (0..spec.num_elements()).map(tolerance).collect()
}

/// The larger; a NaN stays one.
fn larger(a: f64, b: f64) -> f64 {
    if a.is_nan() || a > b { a } else { b }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    #[test]
    fn a_tiny_gradient_gives_its_weight_room_and_a_large_one_does_not() {
        let model = fixture::model("no_layers");
        let spec = ParameterSpec {
            shape: vec![3],
            ..model.parameters()[1].clone()
        };
        let name = spec.name.clone();
        let step = |g: [f64; 3]| StepRecord {
            gradients: IndexMap::from([(name.clone(), g.to_vec())]),
            clip_factor: 1.0,
            learning_rate: 1e-3,
        };
        let start = IndexMap::from([(name.clone(), vec![1.0; 3])]);
        let optimizer = OptimizerConfig::default();
        let steps = [step([1.0, 1e-6, 0.0]), step([1.0, -1e-6, 0.0])];
        let tolerances = Tolerances::golden(&model);
        let bounds = &weights_after(&[spec], &optimizer, &start, &steps, &tolerances)[&name];
        // Adam moves by about the sign of the gradient: 2e-6 cannot change it at 1, and can at 1e-6 and 0.
        assert!(bounds[0] < 1e-5, "{bounds:?}");
        assert!(bounds[1] > 1e-3, "{bounds:?}");
        assert!(bounds[2] > 1e-3, "{bounds:?}");
    }

    /// An ulp of 40 is 3.8e-6: no f32 engine can be within 1e-6 of a weight as large.
    #[test]
    fn a_large_weight_has_room_for_its_rounding() {
        let spec = ParameterSpec {
            shape: vec![2],
            ..fixture::model("no_layers").parameters()[1].clone()
        };
        let name = spec.name.clone();
        let step = || StepRecord {
            gradients: IndexMap::from([(name.clone(), vec![1.0, 1.0])]),
            clip_factor: 1.0,
            learning_rate: 1e-5,
        };
        let start = IndexMap::from([(name.clone(), vec![40.0, 0.5])]);
        let bounds = |tolerances: Tolerances| {
            let optimizer = OptimizerConfig::default();
            let steps = [step(), step(), step()];
            let of = weights_after(
                std::slice::from_ref(&spec),
                &optimizer,
                &start,
                &steps,
                &tolerances,
            );
            of[&name].clone()
        };
        let model = fixture::model("dense");
        let f32 = bounds(Tolerances::derived(&model, DType::F32, 12, 5.0));
        assert!((1e-5..2e-5).contains(&f32[0]), "{f32:?}");
        assert_eq!(f32[1], WEIGHT_FLOOR);
        let f64 = bounds(Tolerances::derived(&model, DType::F64, 12, 5.0));
        assert_eq!(f64, [WEIGHT_FLOOR; 2]);
    }

    #[test]
    fn a_nan_gradient_makes_a_tolerance_that_nothing_passes() {
        let exact = IndexMap::from([("w".to_owned(), vec![1.0, f64::NAN])]);
        let tolerances = Tolerances::golden(&fixture::model("dense"));
        assert!(tolerances.gradients(&exact)["w"].is_nan());
        assert!(tolerances.grad_norm(&exact).is_nan());
    }

    #[test]
    fn derived_gradients_are_held_against_their_layer() {
        let tensor = |name: &str, value| (name.to_owned(), vec![value, 0.0]);
        let exact = IndexMap::from([
            tensor("model.layers.1.a.weight", 0.0),
            tensor("model.layers.1.b.weight", 4.0),
            tensor("model.layers.11.a.weight", 1.0),
            tensor("model.norm.weight", 2.0),
        ]);
        let scales = |t: Tolerances| -> Vec<f64> {
            let tolerances = t.gradients(&exact);
            tolerances.values().map(|g| g / t.gradient).collect()
        };
        let model = fixture::model("dense");
        let by_layer = scales(Tolerances::derived(&model, DType::F32, 12, 5.0));
        let own = scales(Tolerances::golden(&model));
        let near = |a: &[f64], b: [f64; 4]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-12);
        assert!(near(&by_layer, [4.0, 4.0, 1.0, 2.0]), "{by_layer:?}");
        assert!(near(&own, [0.0, 4.0, 1.0, 2.0]), "{own:?}");
    }

    #[test]
    fn golden_sizes_give_the_given_tolerances() {
        let model = crate::golden::Golden::read("llama_mha")
            .expect("golden files")
            .model;
        let derived = Tolerances::derived(&model, DType::F32, 24, 7.0);
        assert!((0.5e-5..4e-5).contains(&derived.log_prob), "{derived:?}");
        assert!((2e-6..4e-5).contains(&derived.gradient), "{derived:?}");
    }
}

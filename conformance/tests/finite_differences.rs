//! The oracle's gradients beside central differences of its own loss, with every derivative at work: entropy,
//! log-probs at ids, temperature. (The golden files hold only those of the mean NLL.)

use drivetrain_conformance::{
    fixture::{self, Random, batches},
    objective::Polynomial,
    oracle::ReferenceBackend,
    suite::Subject,
    train::gradients,
};
use drivetrain_core::{
    Result,
    batch::{Batch, BatchTotals},
    config::{LoadBalancing, MoeConfig},
    engine::Engine,
    model::ModelSpec,
    moe::{LOAD_BALANCING_LOSS, ROUTER_Z_LOSS},
    weights::MemoryWeights,
};

const OBJECTIVE: Polynomial = Polynomial {
    temperature: 0.7,
    entropy: true,
    at_ids: true,
};
const STEP: f64 = 1e-5;
const ELEMENTS: usize = 4;

/// The loss that gradients are of: the objective's, and those of the router.
fn loss(
    subject: &Subject,
    model: &ModelSpec,
    weights: &MemoryWeights,
    batch: &Batch,
) -> Result<f64> {
    let totals = BatchTotals::count(batch);
    let balancing = subject.moe.load_balancing_coefficient.unwrap_or(0.0);
    let z = subject.moe.z_loss_coefficient;
    let losses = subject.run_from(&subject.job(model), weights, |rank| {
        let report = rank.engine.forward_backward(batch, &OBJECTIVE, &totals)?;
        let of = |name| report.metrics.value(name).unwrap_or(0.0);
        Ok(report.loss + balancing * of(LOAD_BALANCING_LOSS) + z * of(ROUTER_Z_LOSS))
    })?;
    Ok(losses[0])
}

fn check(name: &str) {
    check_with(name, MoeConfig::default());
}

fn check_with(name: &str, moe: MoeConfig) {
    let mut model = fixture::model(name);
    model.layers.truncate(2);
    let weights = fixture::weights(&model, 3).expect("weights");
    let batch = batches::scored(&[(6, 4), (3, 2)], model.vocab_size, 3).expect("a batch");
    let batch = batches::with_columns(batch, model.vocab_size, 3).expect("columns");
    let subject = Subject::new(ReferenceBackend::new()).with_moe(moe);
    let totals = BatchTotals::count(&batch);
    let exact = subject
        .run_from(&subject.job(&model), &weights, |rank| {
            rank.engine.forward_backward(&batch, &OBJECTIVE, &totals)?;
            gradients(&mut rank.engine)
        })
        .expect("gradients");
    let mut random = Random::new(3, name);
    for (tensor, gradient) in &exact[0] {
        for _ in 0..ELEMENTS {
            let at = random.below(gradient.len());
            let moved = |by: f64| {
                let mut moved = weights.clone();
                let mut values = weights.values(tensor).expect("a tensor").to_vec();
                values[at] += by;
                let spec = model.parameters().into_iter().find(|p| p.name == *tensor);
                let shape = spec.expect("a parameter").shape;
                moved
                    .insert(tensor, &shape, model.dtype, values)
                    .expect("the same shape");
                loss(&subject, &model, &moved, &batch).expect("a loss")
            };
            let slope = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
            let (found, scale) = (gradient[at], gradient[at].abs().max(0.1));
            // The third derivative, times STEP^2 / 6, and the rounding of the losses, over STEP.
            assert!(
                (found - slope).abs() <= 2e-7 * scale,
                "{name} {tensor}[{at}]: {found} against {slope}"
            );
        }
    }
}

#[test]
fn dense() {
    check("dense");
}

#[test]
fn bias_and_window() {
    check("bias");
    check("window");
}

#[test]
fn tied() {
    check("tied");
}

#[test]
fn norms_of_heads_and_yarn() {
    check("q3");
    check("rope_yarn");
}

#[test]
fn experts_renormalised_and_not() {
    check("mixtral");
    check("q3_moe");
}

#[test]
fn router_losses() {
    for form in [LoadBalancing::Sequence, LoadBalancing::Global] {
        let moe = MoeConfig {
            load_balancing: Some(form),
            load_balancing_coefficient: Some(0.3),
            z_loss_coefficient: 0.2,
            ..MoeConfig::default()
        };
        check_with("mixtral", moe);
        check_with("q3_moe", moe);
    }
}

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
    engine::Engine,
    model::ModelSpec,
    weights::MemoryWeights,
};

const OBJECTIVE: Polynomial = Polynomial {
    temperature: 0.7,
    entropy: true,
    at_ids: true,
};
const STEP: f64 = 1e-5;
const ELEMENTS: usize = 4;

fn loss(model: &ModelSpec, weights: &MemoryWeights, batch: &Batch) -> Result<f64> {
    let subject = Subject::new(ReferenceBackend::new());
    let totals = BatchTotals::count(batch);
    let losses = subject.run_from(&subject.job(model), weights, |rank| {
        let report = rank.engine.forward_backward(batch, &OBJECTIVE, &totals)?;
        Ok(report.loss)
    })?;
    Ok(losses[0])
}

fn check(name: &str) {
    let mut model = fixture::model(name);
    model.layers.truncate(2);
    let weights = fixture::weights(&model, 3).expect("weights");
    let batch = batches::scored(&[(6, 4), (3, 2)], model.vocab_size, 3).expect("a batch");
    let batch = batches::with_columns(batch, model.vocab_size, 3).expect("columns");
    let subject = Subject::new(ReferenceBackend::new());
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
                loss(&model, &moved, &batch).expect("a loss")
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
